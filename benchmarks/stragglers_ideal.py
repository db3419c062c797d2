"""What a run with backup workers takes where only computing takes time: no exchange, no catching up, no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Delay = Callable[[int, int], float]
"""Seconds that a rank's turn lasts, of (rank, turn)."""


def ideal_seconds(workers: int, backups: int, steps: int, lasts: Delay) -> float:
    """Seconds until so many steps have ended.

    A step ends when all but `backups` have come. Whoever has not goes on computing what nobody needs, and then begins
    the step at which the others are, at once and from its beginning.

    Args:
        workers: how many.
        backups: how many a step goes without.
        steps: to be taken.
        lasts: how long each turn of each worker lasts.
    """
    turns, step, here = [0] * workers, 0, list[int]()
    coming = sorted((lasts(rank, 0), rank, 0) for rank in range(workers))  # (when, who, at which step)
    while True:
        now, rank, begun = heappop(coming)
        turns[rank] += 1
        if begun == step:
            here.append(rank)
        else:
            heappush(coming, (now + lasts(rank, turns[rank]), rank, step))
        if len(here) < workers - backups:
            continue
        step += 1
        if step == steps:
            return now
        for member in here:
            heappush(coming, (now + lasts(member, turns[member]), member, step))
        here = []
