# SPDX-License-Identifier: Apache-2.0
"""The clock, locks, timers and threads of a comm, which a simulation can replace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

T = TypeVar("T")


class Condition(Protocol):
    """The used part of `threading.Condition`: a reentrant lock with waits for changes."""

    def __enter__(self) -> bool:
        """Take the lock."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Release the lock."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock until a change; return False after `timeout` seconds without one."""
        ...

    def notify_all(self) -> None:
        """Wake all waiting threads."""
        ...


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True, name="thinwire").start()


@dataclass(frozen=True)
class Runtime:
    """The functions of the machine that a comm and its mailboxes use.

    Attributes:
        clock: the time in seconds, from an arbitrary start; also used for the meter's intervals.
        condition: makes a lock with waits for changes.
        call_later: calls a function in another thread after a number of seconds.
        start_thread: runs a function in a new thread.
    """

    clock: Callable[[], float] = time.perf_counter
    condition: Callable[[], Condition] = threading.Condition
    call_later: Callable[[float, Callable[[], None]], None] = _call_later
    start_thread: Callable[[Callable[[], None]], None] = _start_thread

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Run a call in a new thread, which keeps no process alive if the call never returns."""
        future: Future[T] = Future()
        self.start_thread(lambda: complete(future, call))
        return future


REAL = Runtime()
"""The runtime of real training."""


def complete(future: Future[T], call: Callable[[], T]) -> None:
    """Run a call, and give its result or its error to a future."""
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
