r"""Greedy maximisation of facility location: exact, exact and lazy, and by samples.

Greedy reaches $F(S) \ge (1-1/e)\,F(S^*)$ (Nemhauser, Wolsey and Fisher 1978), and with a bound on the cost instead of
a budget at most $1+\ln\max_e F(e)$ times the fewest points (Wolsey 1982). Of equal gains the smallest number wins.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from thinwire.coreset.facility import (
    CoordinateFacility,
    DistanceFacility,
    Facility,
    Gains,
    Goal,
    Numbers,
    Picks,
    fused,
    nearest_of,
)
from thinwire.coreset.similarity import Distances, among
from thinwire.errors import ConfigError

_WIDEST = 512


def everyone(facility: Facility) -> Numbers:
    """All candidates."""
    return np.arange(facility.n, dtype=np.int64)


def nothing(facility: Facility) -> Picks:
    """Where a selection begins: every point is at the greatest distance, 1."""
    return Picks(cost=float(facility.points))


def replayed(facility: Facility, candidates: list[int], goal: Goal) -> Picks:
    """These very candidates in their order, as far as the goal."""
    picks, silent = nothing(facility), replace(goal, told=None)
    for candidate in candidates:
        if picks.done(silent):
            break
        facility.take(candidate, len(picks.indices))
        cost = facility.cost()
        picks.add(candidate, picks.cost - cost)
    return picks


def naive(facility: Facility, goal: Goal) -> Picks:
    """Ask for the gains of all candidates before each pick: n gains a pick, and the yardstick for the others."""
    picks, open_ = nothing(facility), np.ones(facility.n, dtype=bool)
    while not picks.done(goal):
        left = np.flatnonzero(open_)
        gains = facility.gains(left)
        best = int(gains.argmax())
        open_[left[best]] = False
        picks.take(facility, int(left[best]), float(gains[best]))
    return picks


class Bounds:
    """Candidates by what they would save at most, the most first, then the smallest number.

    Gains never grow, so a gain of the past bounds that of the present. Those that were asked for once stay in a sorted
    array, and only those that were asked for again go to a heap.

    Args:
        candidates: int64, [m].
        gains: float64, [m].
    """

    def __init__(self, candidates: Numbers, gains: Gains) -> None:
        order = np.lexsort((candidates, -gains))
        self._candidates, self._gains = candidates[order], gains[order]
        self._next = 0
        self._heap: list[tuple[float, int]] = []

    def top(self) -> tuple[float, int] | None:
        """(minus the bound, number) of the first; None when there is none left."""
        sorted_ = self._sorted()
        if not self._heap:
            return sorted_
        return self._heap[0] if sorted_ is None else min(sorted_, self._heap[0])

    def pop(self) -> int:
        """Take the first out, and return its number."""
        top = self.top()
        if self._heap and self._heap[0] == top:
            return heapq.heappop(self._heap)[1]
        self._next += 1
        return int(self._candidates[self._next - 1])

    def push(self, gain: float, candidate: int) -> None:
        """Put one back with a new bound."""
        heapq.heappush(self._heap, (-gain, candidate))

    def _sorted(self) -> tuple[float, int] | None:
        if self._next == len(self._candidates):
            return None
        return -float(self._gains[self._next]), int(self._candidates[self._next])


def lazy(facility: Facility, goal: Goal, *, candidates: Numbers | None = None, picks: Picks | None = None) -> Picks:
    """Ask again only for those whose bound is above the best gain found: a few per cent of `naive`'s gains.

    The candidates with the highest bounds are asked for in blocks, in one pass over the points each; a block is twice
    as wide as the last where that did not settle the pick. The picks are `naive`'s, in its order. Minoux 1978.

    Args:
        facility: the points.
        goal: when to stop.
        candidates: int64; whom to choose from; all unless given.
        picks: go on from these, which the facility has taken.
    """
    wanted = everyone(facility) if candidates is None else candidates
    picks = nothing(facility) if picks is None else picks
    if picks.done(goal):
        return picks
    wanted = wanted[~np.isin(wanted, picks.indices)]
    if (compiled := fused(facility)) is not None:
        compiled.lazy(wanted, picks, goal)
        return picks
    bounds, fresh = Bounds(wanted, facility.gains(wanted)), True
    while not picks.done(goal) and (top := bounds.top()) is not None:
        if fresh:
            gain, best = -top[0], bounds.pop()
        else:
            gain, best = _settled(facility, bounds)
        picks.take(facility, best, gain)
        fresh = False
    return picks


def _settled(facility: Facility, bounds: Bounds) -> tuple[float, int]:
    """The candidate of the greatest gain, taken out of the bounds, and that gain."""
    asked: list[tuple[float, int]] = []
    best, width = (math.inf, 0), facility.block
    while stale := _above(bounds, best, width):
        gains = facility.gains(np.asarray(stale, dtype=np.int64))
        asked += zip((-gains).tolist(), stale, strict=True)
        best, width = min(asked), min(2 * width, max(_WIDEST, facility.block))
    for loss, candidate in asked:
        if candidate != best[1]:
            bounds.push(-loss, candidate)
    return -best[0], best[1]


def _above(bounds: Bounds, best: tuple[float, int], width: int) -> list[int]:
    """Up to so many candidates, taken out of the bounds, that may still be better than the best."""
    found: list[int] = []
    while len(found) < width and (top := bounds.top()) is not None and top < best:
        found.append(bounds.pop())
    return found


def stochastic(facility: Facility, goal: Goal, *, eps: float, generator: torch.Generator) -> Picks:
    r"""Ask for the gains of a random sample of $\frac nk\ln\frac1\varepsilon$ before each pick.

    $\mathbb E F(S) \ge (1-1/e-\varepsilon)F(S^*)$ with $n\ln\frac1\varepsilon$ gains in all. Mirzasoleiman et al.,
    Lazier Than Lazy Greedy, AAAI 2015, arXiv:1409.7938, Algorithm 1.

    Args:
        facility: the points.
        goal: when to stop; the sample is for its budget.
        eps: in (0, 1); less looks at more candidates.
        generator: draws the samples, on the CPU.

    Raises:
        ConfigError: eps is out of range.
    """
    if not 0 < eps < 1:
        raise ConfigError(f"eps={eps}: must lie between 0 and 1; 0.01 is usual, and 0.9 is hardly better than random")
    size = math.ceil(facility.n / goal.budget * math.log(1 / eps))
    picks, left = nothing(facility), everyone(facility)
    while not picks.done(goal):
        drawn = torch.randint(2**62, (min(size, len(left)),), generator=generator).numpy()
        # A partial shuffle: the sample moves to the front, the rest keeps what it had.
        for place, draw in enumerate(drawn.tolist()):
            other = place + draw % (len(left) - place)
            left[place], left[other] = left[other], left[place]
        sample = np.sort(left[: len(drawn)])
        gains = facility.gains(sample)
        best = int(gains.argmax())
        picks.take(facility, int(sample[best]), float(gains[best]))
        left = left[left != sample[best]]
    return picks


# -- GreeDi ------------------------------------------------------------------------------------------------------------


def picked_in_parts(points: Tensor | Distances, goal: Goal, parts: int, generator: torch.Generator) -> list[Numbers]:
    """The picks of lazy greedy in each of some random parts, in numbers of all points.

    Args:
        points: coordinates in units, or distances.
        goal: its budget is that of each part; a part as small as it is taken whole.
        parts: how many.
        generator: draws the parts.
    """
    n = len(points) if isinstance(points, Tensor) else points.n
    order = torch.randperm(n, generator=generator)
    return [picked(points, members.sort().values, goal) for members in order.tensor_split(min(parts, n))]


def picked(points: Tensor | Distances, members: Tensor, goal: Goal) -> Numbers:
    """The picks of lazy greedy among some of the points, in numbers of all."""
    if len(members) <= goal.budget:
        return members.numpy()
    if isinstance(points, Tensor):
        nearest, block = nearest_of(points[members.to(points.device)])
        facility: Facility = CoordinateFacility(nearest, 1.0, block=block)
    else:
        facility = DistanceFacility(among(points, members))
    own = lazy(facility, replace(goal, cost=None, told=None)).indices
    return members.numpy()[own]


def best_of_parts(make: Callable[[], Facility], goal: Goal, parts: list[Numbers]) -> tuple[Facility, Picks]:
    """Lazy greedy among all parts' picks, or one part's own picks where those are better.

    Args:
        make: a facility of all points where nothing is chosen yet.
        goal: when to stop.
        parts: what was picked in each.
    """
    union = np.sort(np.concatenate(parts))
    facility = make()
    best = (facility, lazy(facility, goal, candidates=union))
    for part in parts:
        facility = make()
        picks = replayed(facility, part.tolist(), goal)
        if picks.cost < best[1].cost and len(picks.indices) <= len(best[1].indices):
            best = (facility, picks)
    return best
