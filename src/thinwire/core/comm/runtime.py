# SPDX-License-Identifier: Apache-2.0
"""The clock, the locks, the timers and the threads of a comm, in one place, so that a simulation can bring its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol


class Condition(Protocol):
    """What is used of `threading.Condition`: a lock that its holder may take again, and waits for changes."""

    def __enter__(self) -> bool:
        """Take the lock."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Release the lock."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until a change; False after so many seconds without one."""
        ...

    def notify_all(self) -> None:
        """Tell all that wait of a change."""
        ...


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True, name="thinwire-all-reduce").start()


@dataclass(frozen=True)
class Runtime:
    """What a comm, and who waits beside it, uses of the machine that it runs on.

    Attributes:
        clock: the time in seconds, from any beginning; that of the meter's intervals.
        condition: makes a lock with waits for changes.
        call_later: calls a function after so many seconds, in another thread.
        start_thread: runs a function in a thread of its own.
    """

    clock: Callable[[], float] = time.perf_counter
    condition: Callable[[], Condition] = threading.Condition
    call_later: Callable[[float, Callable[[], None]], None] = _call_later
    start_thread: Callable[[Callable[[], None]], None] = _start_thread


REAL = Runtime()
"""What training uses."""
