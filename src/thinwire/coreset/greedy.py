# SPDX-License-Identifier: Apache-2.0
r"""Greedy maximisation of facility location: naive, lazy, and in parts (GreeDi).

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

from thinwire.coreset.facility import Facility, Gains, Goal, Numbers, Picks, compiled_nearest, facility_of
from thinwire.coreset.similarity import Distances, among

_WIDEST = 512


def no_picks(facility: Facility) -> Picks:
    """Return the start of a selection: every point is at the greatest distance, 1."""
    return Picks(cost=float(facility.n))


def replay(facility: Facility, candidates: list[int], goal: Goal) -> Picks:
    """Choose these candidates in their order, until the goal is reached."""
    picks, quiet = no_picks(facility), replace(goal, on_progress=None)
    for candidate in candidates:
        if picks.done(quiet):
            break
        facility.take(candidate, len(picks.indices))
        # The gain follows from the costs, which are exact; `gains` would take another pass.
        cost = facility.cost()
        picks.add(candidate, picks.cost - cost)
    return picks


def naive(facility: Facility, goal: Goal) -> Picks:
    """Compute the gains of all candidates before each pick: the baseline of the other methods."""
    picks, open_ = no_picks(facility), np.ones(facility.n, dtype=bool)
    while not picks.done(goal):
        left = np.flatnonzero(open_)
        gains = facility.gains(left)
        best = int(gains.argmax())
        open_[left[best]] = False
        picks.take(facility, int(left[best]), float(gains[best]))
    return picks


class Bounds:
    """A priority queue of candidates by upper bounds of their gains, the largest first, then the smallest number.

    Gains never grow, so an earlier gain bounds the current one. Candidates start in a sorted array, and only those
    whose gain was computed again move to a heap, which stays small.

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
        """(minus the bound, number) of the first candidate; None when none is left."""
        if self._next == len(self._candidates):
            return self._heap[0] if self._heap else None
        first = -float(self._gains[self._next]), int(self._candidates[self._next])
        return min(first, self._heap[0]) if self._heap else first

    def pop(self) -> int:
        """Remove the first candidate, and return its number."""
        top = self.top()
        if self._heap and self._heap[0] == top:
            return heapq.heappop(self._heap)[1]
        self._next += 1
        return int(self._candidates[self._next - 1])

    def push(self, gain: float, candidate: int) -> None:
        """Insert a candidate again with a new bound."""
        heapq.heappush(self._heap, (-gain, candidate))


def lazy(facility: Facility, goal: Goal, *, candidates: Numbers | None = None) -> Picks:
    """Recompute gains only of candidates whose bound is above the best gain found: a few per cent of `naive`'s gains.

    The candidates with the highest bounds are evaluated in blocks, each in one pass over the points; a block is twice
    as wide as the last where that did not determine the pick. The picks and their order are those of `naive`.
    Minoux 1978.

    Args:
        facility: the points.
        goal: when to stop.
        candidates: int64, to choose from; all unless given.
    """
    wanted = np.arange(facility.n, dtype=np.int64) if candidates is None else candidates
    picks = no_picks(facility)
    if (compiled := compiled_nearest(facility)) is not None:
        compiled.lazy(wanted, picks, goal)
        return picks
    bounds, fresh = Bounds(wanted, facility.gains(wanted)), True
    while not picks.done(goal) and (top := bounds.top()) is not None:
        if fresh:
            gain, best = -top[0], bounds.pop()
        else:
            gain, best = _best_candidate(facility, bounds)
        picks.take(facility, best, gain)
        fresh = False
    return picks


def _best_candidate(facility: Facility, bounds: Bounds) -> tuple[float, int]:
    """Return the greatest gain and its candidate, which is removed from the bounds."""
    evaluated: list[tuple[float, int]] = []
    best, width = (math.inf, 0), facility.block
    while True:
        stale: list[int] = []
        # Only candidates whose bound beats the best gain so far can change the pick.
        while len(stale) < width and (top := bounds.top()) is not None and top < best:
            stale.append(bounds.pop())
        if not stale:
            break
        gains = facility.gains(np.asarray(stale, dtype=np.int64))
        evaluated += zip((-gains).tolist(), stale, strict=True)
        best, width = min(evaluated), min(2 * width, max(_WIDEST, facility.block))
    for loss, candidate in evaluated:
        if candidate != best[1]:
            bounds.push(-loss, candidate)
    return -best[0], best[1]


# -- GreeDi ------------------------------------------------------------------------------------------------------------


def pick_in_parts(points: Tensor | Distances, goal: Goal, parts: int, generator: torch.Generator) -> list[Numbers]:
    """Return the picks of lazy greedy in each of several random parts, as numbers of all points.

    Mirzasoleiman et al., Distributed Submodular Maximization, NeurIPS 2013 (GreeDi). With random parts the expectation
    is at least (1-1/e)/2 of the optimum: Barbosa et al., The Power of Randomization, ICML 2015.

    Args:
        points: coordinates in units, or distances.
        goal: its budget is that of each part; a smaller part is chosen completely.
        parts: number of parts.
        generator: draws the parts.
    """
    n = len(points) if isinstance(points, Tensor) else points.n
    order = torch.randperm(n, generator=generator, device="cpu")
    return [pick_among(points, members.sort().values, goal) for members in order.tensor_split(min(parts, n))]


def pick_among(points: Tensor | Distances, members: Tensor, goal: Goal) -> Numbers:
    """Return the picks of lazy greedy among some of the points, as numbers of all points."""
    if len(members) <= goal.budget:
        return members.numpy()
    own = lazy(facility_of(among(points, members)), replace(goal, cost=None, on_progress=None)).indices
    return members.numpy()[own]


def best_of_parts(make: Callable[[], Facility], goal: Goal, parts: list[Numbers]) -> tuple[Facility, Picks]:
    """Lazy greedy among the picks of all parts, or the picks of one part where those are better.

    Args:
        make: creates a facility of all points without representatives.
        goal: when to stop.
        parts: the picks of each part.
    """
    union = np.sort(np.concatenate(parts))
    facility = make()
    best = (facility, lazy(facility, goal, candidates=union))
    for part in parts:
        facility = make()
        picks = replay(facility, part.tolist(), goal)
        if picks.cost < best[1].cost and len(picks.indices) <= len(best[1].indices):
            best = (facility, picks)
    return best
