# SPDX-License-Identifier: Apache-2.0
r"""Sieve streaming: each point is read once, and either kept or discarded.

Several sieves guess the value $v$ of the best selection, as powers of $1+\varepsilon$. A sieve with picks S keeps a
point whose gain is at least $(v/2-F(S))/(k-|S|)$. One of the guesses is right within $\varepsilon$, and its sieve
reaches $(\tfrac12-\varepsilon)F(S^*)$. Badanidiyuru et al., Streaming Submodular Maximization, KDD 2014, Algorithm 3.

Gains are measured on a random sample of the points, as in the paper, and relative to the sample's medoid, with which
every sieve starts. Relative to the greatest distance instead, the first gain would be so much larger than all others
that every sieve would keep the first points it reads. Greedy then selects among the points of all sieves; where the
best sieve's own picks have a lower cost on the sample, they replace these. The rest of the budget is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from thinwire.coreset.facility import Facility, Gains, Goal, Nearest, Numbers, Picks, nearest_for, rounded
from thinwire.coreset.greedy import lazy, replay
from thinwire.coreset.similarity import to_rows

_SAMPLE = 1000  # points of the sample at least
_BLOCK = 1024  # points that are read at a time
_COMPARISONS = 1 << 30  # distances of the pass at most


@dataclass
class Sieve:
    """One guess of the best value, and the points kept for it."""

    guess: float
    near: Tensor
    value: float = 0.0
    kept: list[int] = field(default_factory=list[int])

    def sift(self, apart: Tensor, start: int, budget: int) -> None:
        """Process a block of points in their order, with distances [block, sample] to the sample."""
        if len(self.kept) >= budget:
            return
        # Gains only shrink, and so does the threshold: a point below it with its gain at the start of the block need
        # not be evaluated until a pick has lowered the threshold.
        bounds = _gains(self.near, apart)
        place = 0
        while len(self.kept) < budget:
            threshold = (self.guess / 2 - self.value) / (budget - len(self.kept))
            above = np.flatnonzero(bounds[place:] >= threshold)
            if not len(above):
                return
            place += int(above[0])
            gain = float((self.near - apart[place]).clamp_min(0).sum(dtype=torch.float64))
            if gain >= threshold:
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
        eps: relative distance between guesses.
        generator: draws the sample, on the CPU.
        make: creates the facility of all points, for the final assignment.
    """
    # The sieves process one point after the other, in NumPy.
    rows = rows.cpu()
    drawn = torch.randperm(len(rows), generator=generator, device="cpu")
    # A few points for each pick, within a limit on the number of distances.
    size = min(len(rows), max(_SAMPLE, min(4 * goal.budget, _COMPARISONS // len(rows))))
    sample = drawn[:size].sort().values
    medoid = int(sample[rounded(to_rows(rows[sample], rows[sample])).sum(0, dtype=torch.float64).argmin()])
    sieves = _sifted(rows, rows[sample], medoid, goal, eps)
    order = dict.fromkeys([*_best(rows, rows[sample], medoid, sieves, goal.budget), *drawn.tolist()])
    facility = make()
    picks = replay(facility, list(order), goal)
    return picks, facility.sizes(len(picks.indices))


class Sampled(Facility):
    """Candidates with coordinates, and other points that they are to represent.

    Args:
        nearest: of the points.
        candidates: float32, [m, d].
    """

    def __init__(self, nearest: Nearest, candidates: Tensor, *, block: int) -> None:
        self.n, self.points = len(candidates), nearest.n
        self.unit, self.block = 1.0, block
        self._nearest, self._candidates = nearest, candidates

    def gains(self, candidates: Numbers) -> Gains:
        """The gain of each candidate now."""
        parts = torch.from_numpy(candidates).split(1024)
        return np.concatenate([self._nearest.gains(self._candidates[part]) for part in parts])

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative."""
        self._nearest.take(self._candidates[candidate], position, None)

    def cost(self) -> float:
        """The sum of the points' distances to their nearest representatives."""
        return self._nearest.cost()

    def sizes(self, count: int) -> Tensor:
        """The number of points that each representative represents."""
        return torch.bincount(self._nearest.representatives(), minlength=count)


def _best(rows: Tensor, sample: Tensor, medoid: int, sieves: list[Sieve], budget: int) -> list[int]:
    """Greedy's picks among those of all sieves, or those of the best sieve where their cost on the sample is lower."""
    union = torch.tensor(
        sorted({medoid, *(index for sieve in sieves for index in sieve.kept)}), dtype=torch.int64, device="cpu"
    )
    nearest, block = nearest_for(sample)
    found = lazy(Sampled(nearest, rows[union], block=block), Goal(min(budget, len(union))))
    useful = [index for index, gain in zip(union[found.indices].tolist(), found.gains, strict=True) if gain > 0]
    if sieves and float(sieves[0].near.sum(dtype=torch.float64)) < found.cost:
        return [medoid, *sieves[0].kept]
    return useful


def _gains(near: Tensor, apart: Tensor) -> Gains:
    """The gains, float64 [m], of points at rounded distances [m, sample] to the sample."""
    return (near - apart).clamp_min_(0).sum(1, dtype=torch.float64).numpy()


def _sifted(rows: Tensor, sample: Tensor, medoid: int, goal: Goal, eps: float) -> list[Sieve]:
    """All sieves after the pass, the most valuable first."""
    near = rounded(to_rows(sample, rows[medoid][None]))[:, 0]
    sieves: dict[int, Sieve] = {}
    greatest, most = 0.0, float(near.sum(dtype=torch.float64))
    for start in range(0, len(rows), _BLOCK):
        apart = rounded(to_rows(rows[start : start + _BLOCK], sample))
        greatest = max(greatest, float(_gains(near, apart).max()))
        _guess(sieves, greatest, min(2 * goal.budget * greatest, 2 * most), eps, near)
        for sieve in sieves.values():
            sieve.sift(apart, start, goal.budget - 1)
        if goal.on_progress is not None:
            goal.on_progress(min(1.0, (start + _BLOCK) / len(rows)))
    return sorted(sieves.values(), key=lambda sieve: (-sieve.value, sieve.guess))


def _guess(sieves: dict[int, Sieve], least: float, most: float, eps: float, near: Tensor) -> None:
    """Keep exactly one sieve for each guess between the greatest single gain and the greatest possible value."""
    if least <= 0:
        return
    step = math.log1p(eps)
    guesses = range(math.ceil(math.log(least) / step), math.floor(math.log(max(most, least)) / step) + 2)
    for each in set(sieves) - set(guesses):
        del sieves[each]
    for each in guesses:
        sieves.setdefault(each, Sieve(math.exp(each * step), near))
