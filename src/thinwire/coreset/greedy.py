# SPDX-License-Identifier: Apache-2.0
r"""Greedy maximisation of facility location: naive, and lazy.

Greedy reaches $F(S) \ge (1-1/e)\,F(S^*)$ (Nemhauser, Wolsey and Fisher 1978), and with a bound on the cost instead of
a budget at most $1+\ln\max_e F(e)$ times the fewest points (Wolsey 1982). Of equal gains the smallest number wins.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from thinwire.coreset.facility import Facility, Gains, Goal, Numbers, Picks

_WIDEST = 512


def no_picks(facility: Facility) -> Picks:
    """Return the start of a selection: every point is at the greatest distance, 1."""
    return Picks(cost=float(facility.n))


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


def lazy(facility: Facility, goal: Goal) -> Picks:
    """Recompute gains only of candidates whose bound is above the best gain found: a few per cent of `naive`'s gains.

    The candidates with the highest bounds are evaluated in blocks, each in one pass over the points; a block is twice
    as wide as the last where that did not determine the pick. The picks and their order are those of `naive`.
    Minoux 1978.
    """
    wanted = np.arange(facility.n, dtype=np.int64)
    picks = no_picks(facility)
    if facility.compiled is not None:
        facility.compiled.lazy(wanted, picks, goal)
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
