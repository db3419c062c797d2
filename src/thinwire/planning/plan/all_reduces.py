# SPDX-License-Identifier: Apache-2.0
"""The duration of an all-reduce between the ranks of a group, by its bytes: measured, and in between."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import synchronize

SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
_REPEATS = 6


def time_all_reduces(
    comm: Comm,
    *,
    budget: float,
    sizes: Sequence[int] = SIZES,
    device: torch.device | None = None,
    figure: Callable[[Sequence[float]], float] = median,
) -> dict[int, float]:
    """Return the seconds of an all-reduce by its bytes; every rank must call.

    Args:
        comm: of the ranks.
        budget: seconds to spend. Two sizes are timed in any case, and others while some are left.
        sizes: bytes of the vectors, in rising order.
        device: of the vectors; that of the comm's own checks unless given.
        figure: what is taken of the repetitions of one size, without the first.

    Raises:
        CommError: a call fails.
    """
    found: dict[int, float] = {}
    here, start, spent = device or comm.check_device, time.perf_counter(), 0.0
    for nbytes in sizes:
        x, times = torch.zeros(nbytes // 4, dtype=torch.float32, device=here), list[float]()
        while len(times) < 2 or (len(times) < _REPEATS and spent < budget):
            synchronize(here)
            begin = time.perf_counter()
            comm.all_reduce_(x).wait()
            synchronize(here)
            times.append(time.perf_counter() - begin)
            # The slowest rank's clock decides for all, or they would not take equally many turns.
            clock = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=comm.check_device)
            spent = max(map(float, comm.all_gather(clock).wait()))
        found[nbytes] = figure(times[1:])
        if spent > budget and len(found) > 1:
            break
    return found


def all_reduce_seconds(measured: Mapping[int, float], nbytes: float) -> float | None:
    """Return the time of an all-reduce of so many bytes, on a straight line through the two nearest measured sizes."""
    points = sorted(measured.items())
    if not points:
        return None
    if len(points) == 1:
        return points[0][1] * max(1.0, nbytes / points[0][0])
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next(((a, b) for a, b in pairs if nbytes <= b[0]), pairs[-1])
    return max(0.0, y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0))
