# SPDX-License-Identifier: Apache-2.0
"""A timeout for other workers, learned from the duration of rounds."""

from __future__ import annotations

from collections import deque
from statistics import median

_ROUNDS = 32
_LEAST_ROUNDS = 8
_DEVIATIONS = 10.0
_FLOOR_SECONDS = 5.0


class Patience:
    """A timeout that follows the run: the median time of a round plus ten deviations.

    A constant is too long for one run and too short for another. A worker that is late once loses only time: the others
    include it in the next view too, as long as its process runs.

    Args:
        cap: the longest timeout, in seconds; also the timeout of the first rounds.

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
        """Record the duration of a round, including the computation before it."""
        self._seconds.append(seconds)

    @property
    def seconds(self) -> float:
        """Return how long to wait in the next round."""
        if len(self._seconds) < _LEAST_ROUNDS:
            return self._cap
        middle = median(self._seconds)
        # A median of deviations, so that one slow round does not make all others wait.
        deviation = 1.4826 * median(abs(each - middle) for each in self._seconds)
        return min(self._cap, max(_FLOOR_SECONDS, middle, middle + _DEVIATIONS * deviation))
