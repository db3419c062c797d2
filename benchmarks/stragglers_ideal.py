# SPDX-License-Identifier: Apache-2.0
"""How long a run with backup workers takes if only computation takes time: no communication, recovery or scheduler."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Delay = Callable[[int, int], float]
"""Seconds that a rank's gradient takes, of (rank, its number)."""


def ideal_seconds(workers: int, backups: int, steps: int, lasts: Delay) -> float:
    """Seconds until so many steps have ended.

    A step ends when all but `backups` workers are ready. A worker that is not finishes its gradient, which is dropped,
    and then begins the step at which the others are.

    Args:
        workers: how many.
        backups: how many a step goes without.
        steps: to be taken.
        lasts: how long each gradient of each worker takes.
    """
    computed, step, ready = [0] * workers, 0, list[int]()
    queue = sorted((lasts(rank, 0), rank, 0) for rank in range(workers))  # (when ready, rank, for which step)
    while True:
        now, rank, begun = heappop(queue)
        computed[rank] += 1
        if begun == step:
            ready.append(rank)
        else:
            heappush(queue, (now + lasts(rank, computed[rank]), rank, step))
        if len(ready) < workers - backups:
            continue
        step += 1
        if step == steps:
            return now
        for member in ready:
            heappush(queue, (now + lasts(member, computed[member]), member, step))
        ready = []
