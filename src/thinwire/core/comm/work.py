# SPDX-License-Identifier: Apache-2.0
"""Handles of asynchronous operations, and the count of bytes and seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Work(Generic[T]):
    """The handle of an asynchronous operation; every call of `wait()` returns its result.

    Args:
        finish: blocks until the operation is complete, and returns its result.
        is_ready: returns whether it is complete, without blocking.
        advance: starts the next stage of a multi-stage operation, after the previous stage is complete.

    Example:
        >>> from thinwire.core.comm.work import Work
        >>> work = Work(lambda: 3).then(lambda x: 2 * x)
        >>> work.ready
        False
        >>> work.wait(), work.ready
        (6, True)
    """

    def __init__(
        self,
        finish: Callable[[], T],
        is_ready: Callable[[], bool] | None = None,
        advance: Callable[[], None] | None = None,
    ) -> None:
        self._finish: Callable[[], T] | None = finish
        self._is_ready = is_ready
        self._advance = advance
        self._result: T

    @property
    def ready(self) -> bool:
        """True if `wait()` would return at once; before the first wait it is known for messages only.

        Raises:
            CommError: the operation has failed, with the error that `wait` would raise.
        """
        return self._finish is None or (self._is_ready is not None and self._is_ready())

    def wait(self) -> T:
        """Block until the operation is complete, and return its result.

        Raises:
            CommTimeoutError: another rank did not answer within the comm's timeout.
            PeerLostError: the connection to another rank is closed.
        """
        if self._finish is not None:
            self._result = self._finish()
            # Dropping the closure frees the buffers that it holds.
            self._finish = None
        return self._result

    def advance(self) -> None:
        """Start the second stage now instead of in `wait`; blocks until the first is complete.

        Does nothing if there is one stage. All ranks must call it at the same place: a stage is a collective call.
        """
        if self._finish is not None and self._advance is not None:
            self._advance()

    def after(self, check: Work[Any]) -> Work[T]:
        """Return the same operation, whose `wait()` first waits for a check."""

        def finish() -> T:
            check.wait()
            return self.wait()

        return Work(finish)

    def then(self, use: Callable[[T], U]) -> Work[U]:
        """Return the same operation with `use` applied to its result inside `wait()`."""
        return Work(lambda: use(self.wait()), lambda: self.ready, self.advance)


def completed(result: T) -> Work[T]:
    """Make the handle of an operation that is already complete."""
    work = Work(lambda: result)
    work.wait()
    return work


@dataclass(frozen=True)
class Interval:
    """A span of one rank's time, in seconds of `time.perf_counter`."""

    kind: str
    name: str
    start: float
    end: float
    step: int


@dataclass
class Meter:
    """The bytes that one rank has sent and the time that it has waited.

    Attributes:
        payload_bytes: bytes this rank sent, headers of the transport excluded. A collective counts what a
            bandwidth-optimal algorithm sends per rank: 2 (n-1)/n of the vector for an all-reduce, (n-1)/n for a
            broadcast.
        check_bytes: bytes of the checks that all ranks make the same calls; `payload_bytes` does not contain them.
        messages: the number of calls that sent anything.
        exposed_seconds: time spent blocked in `Work.wait`, in seconds.
        by_operation: payload bytes by the name of the call.
        tracing: whether to record `intervals`.
        intervals: when this rank communicated and when it waited.

    Example:
        >>> import torch
        >>> from thinwire import CountingComm
        >>> comm = CountingComm(rank=0, size=4)
        >>> _ = comm.all_reduce_(torch.zeros(100)).wait()
        >>> comm.meter.payload_bytes, comm.meter.by_operation
        (600.0, {'all_reduce': 600.0})
    """

    payload_bytes: float = 0.0
    check_bytes: float = 0.0
    messages: int = 0
    exposed_seconds: float = 0.0
    by_operation: dict[str, float] = field(default_factory=dict[str, float])
    tracing: bool = False
    intervals: list[Interval] = field(default_factory=list[Interval])

    def sent(self, operation: str, nbytes: float) -> None:
        """Count one call."""
        self.messages += 1
        self.payload_bytes += nbytes
        self.by_operation[operation] = self.by_operation.get(operation, 0.0) + nbytes

    def timed(self, work: Work[T], operation: str, launched: float, clock: Callable[[], float], step: int) -> Work[T]:
        """Return the same operation, whose wait is counted; it was launched earlier, in seconds of the clock."""

        def finish() -> T:
            start = clock()
            try:
                return work.wait()
            finally:
                self.waited(operation, launched, start, clock(), step)

        return Work(finish)

    def waited(self, operation: str, launched: float, start: float, end: float, step: int) -> None:
        """Count one wait, from `start` to `end`, for an operation launched earlier; all in seconds."""
        self.exposed_seconds += end - start
        if self.tracing:
            self.intervals.append(Interval("communication", operation, launched, end, step))
            self.intervals.append(Interval("wait", operation, start, end, step))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work, before a clock is read: its handles do not block."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe(x: Tensor) -> str:
    """Describe the size and dtype of a vector, for error messages."""
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"
