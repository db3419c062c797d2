# SPDX-License-Identifier: Apache-2.0
"""The coordinator's waiting time for more ranks, from measured times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

Choice = Literal["fixed", "deadline"]
_WINDOW = 64  # the latest times that are kept for each rank
_MIN_SAMPLES = 4  # times needed from each of `least` ranks before times are used


@dataclass
class QuorumRule:
    """Decides when a step has enough ranks.

    Args:
        size: the number of training ranks.
        least: the number of ranks that every step needs.
        choice: "fixed" takes exactly `least` ranks; "deadline" takes all ranks that are ready within the usual time,
            but at least `least`.
        deviations: the deadline, in median absolute deviations beyond the median.
    """

    size: int
    least: int
    choice: Choice = "fixed"
    deviations: float = 3.0
    _seconds: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])
    _lost: set[int] = field(default_factory=set[int])

    def record(self, rank: int, seconds: float) -> None:
        """Record the computation time of a rank's gradient, in time or late."""
        if rank in self._lost:
            return
        self._seconds.setdefault(rank, deque(maxlen=_WINDOW)).append(seconds)

    def lose(self, ranks: Iterable[int]) -> None:
        """Stop waiting for these ranks."""
        for rank in ranks:
            self._lost.add(rank)
            self._seconds.pop(rank, None)

    def seconds_to_wait(self, ready: int, waited_seconds: float) -> float | None:
        """Return the seconds to wait for more ranks: 0 to start now, None to wait without a limit.

        Args:
            ready: the number of ready ranks.
            waited_seconds: seconds since the first of them started to compute.
        """
        if ready < self.least:
            return None
        samples = list(self._seconds.values())
        known = sum(len(each) >= _MIN_SAMPLES for each in samples) >= self.least
        if self.choice == "deadline" and ready < self.size - len(self._lost) and known:
            times = [seconds for each in samples for seconds in each]
            return max(0.0, deadline(times, self.deviations) - waited_seconds)
        return 0.0


def deadline(seconds: Sequence[float], deviations: float, *, slack: float = 0.25) -> float:
    """Return the larger of `1 + slack` medians and the median plus `deviations` median absolute deviations.

    Args:
        seconds: step times, at least one.
        deviations: the number of deviations.
        slack: if all times are alike, the deviation is zero, and the delay of one message would exceed the deadline.
    """
    middle = median(seconds)
    return middle + max(deviations * median(abs(each - middle) for each in seconds), slack * middle)


def best_number(seconds: Sequence[Sequence[float]], least: int = 1) -> int:
    """Return how many of n ranks to wait for: the N with the most gradients per second, N / E[T_(N:n)].

    Args:
        seconds: step times of each rank; shorter lists are repeated to the length of the longest.
        least: the smallest N allowed.
    """
    times = order_statistics(seconds)
    return max(range(least, len(times) + 1), key=lambda number: number / max(times[number - 1], 1e-9))


def order_statistics(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Return E[T_(N:n)] for N = 1..n: the mean time until N ranks are ready."""
    steps = max(len(each) for each in seconds)
    rows = [sorted(each[step % len(each)] for each in seconds) for step in range(steps)]
    return [fmean(column) for column in zip(*rows, strict=True)]
