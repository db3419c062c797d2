r"""Sieve streaming: each point is looked at once, and kept or dropped for good.

Several sieves guess the value $v$ of the best selection, as powers of $1+\varepsilon$; one with picks S keeps a point
that gains at least $(v/2-F(S))/(k-|S|)$. One of the guesses is right within $\varepsilon$, and its sieve reaches
$(\tfrac12-\varepsilon)F(S^*)$. Badanidiyuru et al., Streaming Submodular Maximization, KDD 2014, Algorithm 3.

What is gained is measured on a random sample of the points, as there, and above its medoid, which every sieve begins
with: next to that of a phantom at the greatest distance all other gains would be so small that every sieve would keep
whatever comes first. Greedy then selects among what all sieves kept, and the best sieve's own picks are taken where
they serve the sample better; what is missing of the budget is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.coreset.facility import Facility, Gains, Goal, Nearest, Numbers, Picks, nearest_of, rounded
from thinwire.coreset.greedy import lazy, replayed
from thinwire.coreset.similarity import to_rows

_SAMPLE = 1000
_BLOCK = 1024
_COMPARISONS = 1 << 30


@dataclass
class Sieve:
    """One guess of the best value, and what was kept for it."""

    guess: float
    near: Tensor
    value: float = 0.0
    kept: list[int] = field(default_factory=list[int])

    def sift(self, apart: Tensor, start: int, budget: int) -> None:
        """Look at a block of points, in their order, at distances [block, sample] from the sample."""
        if len(self.kept) >= budget:
            return
        # A gain only shrinks and so does the bar: whoever is below it now, with the gain of the block's beginning,
        # need not be looked at until a pick has lowered the bar.
        bounds = _gains(self.near, apart)
        place = 0
        while len(self.kept) < budget:
            bar = (self.guess / 2 - self.value) / (budget - len(self.kept))
            above = np.flatnonzero(bounds[place:] >= bar)
            if not len(above):
                return
            place += int(above[0])
            gain = float((self.near - apart[place]).clamp_min(0).sum(dtype=torch.float64))
            if gain >= bar:
                self.kept.append(start + place)
                self.value += gain
                self.near = torch.minimum(self.near, apart[place])
            place += 1


def streaming(
    rows: Tensor, goal: Goal, *, eps: float, generator: torch.Generator, make: Callable[[], Facility]
) -> tuple[Picks, Tensor]:
    """Select in one pass.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        goal: when to stop.
        eps: how far apart the guesses are.
        generator: draws the sample, on the CPU.
        make: the facility of all points, for the representation in the end.
    """
    rows = rows.cpu()
    drawn = torch.randperm(len(rows), generator=generator)
    sample = drawn[: _sample_size(len(rows), goal.budget)].sort().values
    medoid = int(sample[rounded(to_rows(rows[sample], rows[sample])).sum(0, dtype=torch.float64).argmin()])
    sieves = _sifted(rows, rows[sample], medoid, goal, eps)
    order = dict.fromkeys([*_best(rows, rows[sample], medoid, sieves, goal.budget), *drawn.tolist()])
    facility = make()
    picks = replayed(facility, list(order), goal)
    return picks, facility.sizes(len(picks.indices))


class Sampled(Facility):
    """Candidates with coordinates, and other points, to be represented.

    Args:
        nearest: of the points.
        candidates: float32, [m, d].
    """

    def __init__(self, nearest: Nearest, candidates: Tensor, *, block: int) -> None:
        self.n, self.points = len(candidates), nearest.n
        self.unit, self.block = 1.0, block
        self._nearest, self._candidates = nearest, candidates

    def gains(self, candidates: Numbers) -> Gains:
        """What each of the candidates would save the points now."""
        parts = torch.from_numpy(candidates).split(1024)
        return np.concatenate([self._nearest.gains(self._candidates[part]) for part in parts])

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative."""
        self._nearest.take(self._candidates[candidate], position, None)

    def cost(self) -> float:
        """The sum of the points' distances to their nearest representatives."""
        return self._nearest.cost()

    def sizes(self, count: int) -> Tensor:
        """How many of the points each representative speaks for."""
        return torch.bincount(self._nearest.representatives(), minlength=count)


def _best(rows: Tensor, sample: Tensor, medoid: int, sieves: list[Sieve], budget: int) -> list[int]:
    """The best sieve's picks, or greedy's among those of all sieves where they serve the sample better."""
    union = torch.tensor(sorted({medoid, *(index for sieve in sieves for index in sieve.kept)}))
    nearest, block = nearest_of(sample)
    found = lazy(Sampled(nearest, rows[union], block=block), Goal(min(budget, len(union))))
    useful = [index for index, gain in zip(union[found.indices].tolist(), found.gains, strict=True) if gain > 0]
    if sieves and float(sieves[0].near.sum(dtype=torch.float64)) < found.cost:
        return [medoid, *sieves[0].kept]
    return useful


def _gains(near: Tensor, apart: Tensor) -> Gains:
    """What points at rounded distances [m, sample] from the sample would save it, float64 [m]."""
    return (near - apart).clamp_min_(0).sum(1, dtype=torch.float64).numpy()


def _sample_size(n: int, budget: int) -> int:
    """A few for each pick, as far as the time allows."""
    return min(n, max(_SAMPLE, min(4 * budget, _COMPARISONS // n)))


def _sifted(rows: Tensor, sample: Tensor, medoid: int, goal: Goal, eps: float) -> list[Sieve]:
    """All sieves after the pass, the one of the greatest value first."""
    near = rounded(to_rows(sample, rows[medoid][None]))[:, 0]
    sieves: dict[int, Sieve] = {}
    greatest, most = 0.0, float(near.sum(dtype=torch.float64))
    for start in range(0, len(rows), _BLOCK):
        apart = rounded(to_rows(rows[start : start + _BLOCK], sample))
        greatest = max(greatest, float(_gains(near, apart).max()))
        _guess(sieves, greatest, min(2 * goal.budget * greatest, 2 * most), eps, near)
        for sieve in sieves.values():
            sieve.sift(apart, start, goal.budget - 1)
        if goal.told is not None:
            goal.told(min(1.0, (start + _BLOCK) / len(rows)))
    return sorted(sieves.values(), key=lambda sieve: (-sieve.value, sieve.guess))


def _guess(sieves: dict[int, Sieve], least: float, most: float, eps: float, near: Tensor) -> None:
    """A sieve for each guess between the greatest single gain and what can be gained at all, and no other."""
    if least <= 0:
        return
    step = math.log1p(eps)
    guesses = range(math.ceil(math.log(least) / step), math.floor(math.log(max(most, least)) / step) + 2)
    for each in set(sieves) - set(guesses):
        del sieves[each]
    for each in guesses:
        sieves.setdefault(each, Sieve(math.exp(each * step), near))
