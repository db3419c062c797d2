# SPDX-License-Identifier: Apache-2.0
"""Which workers of an elastic run are started again, and how soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from thinwire.lab.emulate import WorkerExit
from thinwire.lab.runs.folder import Fields

_FIRST_SECONDS = 1.0
_LONGEST_SECONDS = 30.0
_USERS_ERROR = 2


class Restarts:
    """Decides about each worker that has failed; a worker that fails again and again waits twice as long each time.

    One that the user's mistake has ended is left, since it would end again.

    Args:
        limit: of all workers together.
        over: whether the run has reached its end.
        tell: called with an event for each decision.

    Example:
        >>> told = []
        >>> restarts = Restarts(3, over=lambda: False, tell=told.append)
        >>> killed = WorkerExit(1, code=None, signal=9, seconds=60.0, cpu_seconds=1.0)
        >>> [restarts(killed) for _ in range(4)]
        [1.0, 2.0, 4.0, None]
        >>> told[-1]["how"], told[-1]["after"]
        ('worker 1 was ended by SIGKILL', None)
    """

    def __init__(self, limit: int, *, over: Callable[[], bool], tell: Callable[[Fields], None]) -> None:
        self._limit = self._left = limit
        self._over, self._tell = over, tell
        self._counts: Counter[int] = Counter()

    def __call__(self, record: WorkerExit) -> float | None:
        """In how many seconds a worker is started again; None for one that is not."""
        if self._over() or record.code == _USERS_ERROR:
            return None
        after = None
        if not self._limit:
            return None
        if self._left:
            self._left -= 1
            after = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2 ** self._counts[record.rank])
            self._counts[record.rank] += 1
        event = {"event": "restart", "rank": record.rank, "how": str(record), "after": after, "left": self._left}
        self._tell(event)
        return after
