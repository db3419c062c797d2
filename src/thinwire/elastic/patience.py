# SPDX-License-Identifier: Apache-2.0
"""How long to wait for another worker: learned from how long rounds take."""

from __future__ import annotations

from collections import deque
from statistics import median

_ROUNDS = 32
_LEAST_ROUNDS = 8
_DEVIATIONS = 10.0
_FLOOR_SECONDS = 5.0


class Patience:
    """A timeout that follows the run: the median time of a round, and ten deviations more.

    A constant is too long for the one run and too short for the other. A worker that is late for once loses nothing but
    time: the others take it into the next view too, as long as its process runs.

    Args:
        cap: the longest timeout, in seconds, and that of the first rounds.

    Example:
        >>> patience = Patience(60.0)
        >>> patience.seconds
        60.0
        >>> for seconds in [1.0, 1.2, 1.1, 0.9, 1.0, 1.3, 1.0, 1.1]:
        ...     patience.record(seconds)
        >>> patience.seconds
        5.0
        >>> for seconds in [9.0, 12.0] * 20:
        ...     patience.record(seconds)
        >>> round(patience.seconds, 1)
        32.7
    """

    def __init__(self, cap: float) -> None:
        self._cap = cap
        self._seconds: deque[float] = deque(maxlen=_ROUNDS)

    def record(self, seconds: float) -> None:
        """A round took so long, with the computation before it."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """How long to wait in the next round."""
        if len(self._seconds) < _LEAST_ROUNDS:
            return self._cap
        middle = median(self._seconds)
        # A median of deviations, since one slow round must not make all others wait.
        deviation = 1.4826 * median(abs(each - middle) for each in self._seconds)
        return min(self._cap, max(_FLOOR_SECONDS, middle, middle + _DEVIATIONS * deviation))
