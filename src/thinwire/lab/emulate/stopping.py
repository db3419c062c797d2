# SPDX-License-Identifier: Apache-2.0
"""Workers whose processes are suspended for a while, as on a machine that sleeps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from thinwire.core.quantities import parse_duration, parse_rank
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Stop:
    """One worker's process is suspended once.

    Args:
        rank: which worker.
        after_seconds: when, in seconds of training.
        seconds: for how long.
    """

    rank: int
    after_seconds: float
    seconds: float


def parse_stops(text: str | None, *, workers: int) -> tuple[Stop, ...]:
    """Read entries `RANK:AFTER:DURATION` separated by commas, such as `2:3s:5s`.

    Raises:
        ConfigError: when an entry cannot be read.

    Example:
        >>> parse_stops("2:3s:5s", workers=4)
        (Stop(rank=2, after_seconds=3.0, seconds=5.0),)
    """
    stops: list[Stop] = []
    argument = f"stop {text!r}"
    for entry in text.split(",") if text else ():
        parts = entry.strip().split(":")
        if len(parts) != 3:
            raise ConfigError(
                f"{argument}: {entry.strip()!r} cannot be read. A stop is RANK:AFTER:DURATION, such as 2:3s:5s"
            )
        rank = parse_rank(parts[0], workers, argument=argument)
        after, seconds = (parse_duration(part, argument=argument) for part in parts[1:])
        stops.append(Stop(rank, after, seconds))
    return tuple(stops)


class Stopping:
    """A context in which child processes are suspended by SIGSTOP and later resumed by SIGCONT.

    Each is the leader of a process group, which is suspended as a whole. Leaving the context resumes all of them.

    Args:
        stops: which worker is suspended, when and for how long.
        pids: the processes by rank.
    """

    def __init__(self, stops: Sequence[Stop], pids: Sequence[int]) -> None:
        self._stops, self._pids = stops, pids
        self._timers: list[threading.Timer] = []
        self._stopped: set[int] = set()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start the timers, because training begins now; later calls do nothing."""
        if self._timers:
            return
        for stop in self._stops:
            self._timers.append(threading.Timer(stop.after_seconds, self._signal, (stop.rank, True)))
            self._timers.append(threading.Timer(stop.after_seconds + stop.seconds, self._signal, (stop.rank, False)))
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __enter__(self) -> Self:
        """Do nothing yet: the timers start with `begin`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the timers, and resume the processes that are suspended."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        for rank in list(self._stopped):
            self._signal(rank, False)

    def _signal(self, rank: int, stop: bool) -> None:
        with self._lock, suppress(ProcessLookupError):
            (self._stopped.add if stop else self._stopped.discard)(rank)
            os.killpg(self._pids[rank], signal.SIGSTOP if stop else signal.SIGCONT)
