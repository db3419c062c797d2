"""The clock, the timers and the threads of a quorum, in one place, so that tests can bring their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, call)
    timer.daemon = True
    timer.start()


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True, name="thinwire-all-reduce").start()


@dataclass(frozen=True)
class Runtime:
    """What a participant uses of the machine that it runs on.

    Attributes:
        clock: the time in seconds, from any beginning; that of the meter's intervals by default.
        call_later: calls a function after so many seconds, in another thread.
        start_thread: runs a function in a thread of its own.
    """

    clock: Callable[[], float] = time.perf_counter
    call_later: Callable[[float, Callable[[], None]], None] = _call_later
    start_thread: Callable[[Callable[[], None]], None] = _start_thread


REAL = Runtime()
"""What training uses."""
