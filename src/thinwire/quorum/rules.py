"""How long a step waits for whom, from what steps took before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

Choice = Literal["fixed", "deadline", "online"]
_REMEMBERED = 64
_LEAST_KNOWN = 4  # steps of as many ranks as must come, before their times choose anything


@dataclass
class Rule:
    """When a step has waited enough.

    Args:
        size: ranks that may arrive.
        least: ranks that must have.
        choice: "fixed" is `least`; "deadline" is all, but no longer than usual once `least` are here; "online" is as
            many as have made the most of time so far, from `least` on.
        deviations: of a deadline, in median absolute deviations beyond the median.
    """

    size: int
    least: int
    choice: Choice = "fixed"
    deviations: float = 3.0
    _seconds: dict[int, deque[float]] = field(default_factory=dict[int, deque[float]])

    def note(self, rank: int, seconds: float) -> None:
        """A rank has taken so long for its gradient, whether in time or not."""
        self._seconds.setdefault(rank, deque(maxlen=_REMEMBERED)).append(seconds)

    def patience(self, here: int, waited_seconds: float) -> float | None:
        """Seconds to wait for more ranks: 0 is enough waited, None until the next arrives.

        Args:
            here: ranks that have arrived.
            waited_seconds: since the first of them began to compute.
        """
        if here < self.least:
            return None
        if self.choice == "deadline" and here < self.size and self._known:
            known = [seconds for each in self._seconds.values() for seconds in each]
            return max(0.0, deadline(known, self.deviations) - waited_seconds)
        return 0.0 if here >= self._wanted() else None

    def _wanted(self) -> int:
        if self.choice != "online" or not self._known:
            return self.least
        return best_number(list(self._seconds.values()), self.least)

    @property
    def _known(self) -> bool:
        return sum(len(each) >= _LEAST_KNOWN for each in self._seconds.values()) >= self.least


def deadline(seconds: Sequence[float], deviations: float) -> float:
    """The median, and so many median absolute deviations more, a quarter at least: few stragglers do not move it.

    Args:
        seconds: that steps took, at least one.
        deviations: how many.
    """
    middle = median(seconds)
    # Where all are alike, a message's delay would be late already.
    return middle + max(deviations * median(abs(each - middle) for each in seconds), middle / 4)


def best_number(seconds: Sequence[Sequence[float]], least: int = 1) -> int:
    """How many of n ranks to wait for: the N with the most gradients in a second, N / E[T_(N:n)].

    Args:
        seconds: what each rank's steps took; of different lengths, the shorter ones are repeated.
        least: the least that counts.
    """
    times = order_statistics(seconds)
    return max(range(least, len(times) + 1), key=lambda number: number / max(times[number - 1], 1e-9))


def order_statistics(seconds: Sequence[Sequence[float]]) -> list[float]:
    """E[T_(N:n)] for N = 1..n: the mean time until the N-th rank is there."""
    steps = max(len(each) for each in seconds)
    rows = [sorted(each[step % len(each)] for each in seconds) for step in range(steps)]
    return [fmean(column) for column in zip(*rows, strict=True)]


def shares(log: Sequence[Sequence[int]], size: int) -> Mapping[int, float]:
    """The share of steps to which each rank has contributed.

    Args:
        log: the members of each step.
        size: how many ranks there are.
    """
    return {rank: sum(rank in members for members in log) / max(1, len(log)) for rank in range(size)}
