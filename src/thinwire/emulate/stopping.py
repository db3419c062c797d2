"""Workers that stand still for a while, as a machine does that is suspended."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from thinwire.emulate.units import parse_duration, parse_rank
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Stop:
    """One worker's process is stopped once.

    Args:
        rank: of the worker.
        after_seconds: of training, it is stopped.
        seconds: it then stands still.
    """

    rank: int
    after_seconds: float
    seconds: float


def parse_stops(text: str | None, *, workers: int) -> tuple[Stop, ...]:
    """Read entries `RANK:AFTER:DURATION` separated by commas, such as `2:3s:5s`.

    Raises:
        ConfigError: when an entry cannot be read.
    """
    return tuple(_parse_stop(entry.strip(), f"stop {text!r}", workers) for entry in text.split(",")) if text else ()


def _parse_stop(entry: str, asked: str, workers: int) -> Stop:
    parts = entry.split(":")
    if len(parts) != 3:
        raise ConfigError(f"{asked}: {entry!r} cannot be read; a stop is RANK:AFTER:DURATION, such as 2:3s:5s")
    rank = parse_rank(parts[0], workers, asked=asked)
    return Stop(rank, parse_duration(parts[1], asked=asked), parse_duration(parts[2], asked=asked))


class Stopping:
    """A context within which processes of one's own are stopped, and continued at its end at the latest.

    Each is the leader of a process group, which is stopped as a whole.

    Args:
        stops: when to stop whom.
        pids: of the processes, by rank.
    """

    def __init__(self, stops: Sequence[Stop], pids: Sequence[int]) -> None:
        self._stops, self._pids = stops, pids
        self._timers: list[threading.Timer] = []
        self._stopped: set[int] = set()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Training begins now; later calls are nothing."""
        if self._timers:
            return
        for stop in self._stops:
            self._timers.append(threading.Timer(stop.after_seconds, self._signal, (stop.rank, True)))
            self._timers.append(threading.Timer(stop.after_seconds + stop.seconds, self._signal, (stop.rank, False)))
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __enter__(self) -> Self:
        """Nothing happens before `begin`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop nobody any more, and let everyone go on."""
        for timer in self._timers:
            timer.cancel()
        for timer in self._timers:
            timer.join()
        for rank in list(self._stopped):
            self._signal(rank, False)

    def _signal(self, rank: int, stops: bool) -> None:
        with self._lock, suppress(ProcessLookupError):
            (self._stopped.add if stops else self._stopped.discard)(rank)
            os.killpg(self._pids[rank], signal.SIGSTOP if stops else signal.SIGCONT)
