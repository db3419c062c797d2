"""A message on its way, and the count of what was sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Work(Generic[T]):
    """A message on its way; `wait()` returns what arrived, the first time and every later time.

    Args:
        finish: blocks until the message is here, and returns it.
        is_here: whether it is, where the wire can tell.
    """

    def __init__(self, finish: Callable[[], T], is_here: Callable[[], bool] | None = None) -> None:
        self._finish: Callable[[], T] | None = finish
        self._is_here = is_here
        self._result: T

    @property
    def ready(self) -> bool:
        """Whether `wait()` would return at once; without a wait known of messages only.

        Raises:
            CommError: of a message that will not come, as `wait` would.
        """
        return self._finish is None or (self._is_here is not None and self._is_here())

    def wait(self) -> T:
        """Block until the message has arrived and been sent.

        Raises:
            CommTimeoutError: nobody answered within the comm's deadline.
            PeerLostError: a peer's connection is gone.
        """
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def then(self, use: Callable[[T], U]) -> Work[U]:
        """The same message, with `use` applied inside `wait()` to what arrived."""
        return Work(lambda: use(self.wait()), lambda: self.ready)


def completed(result: T) -> Work[T]:
    """A message that is already here."""
    work = Work(lambda: result)
    work.wait()
    return work


@dataclass(frozen=True)
class Interval:
    """A stretch of one rank's time, in seconds of `time.perf_counter`."""

    kind: str
    name: str
    start: float
    end: float
    step: int


@dataclass
class Meter:
    """What one rank has sent and how long it has waited.

    Attributes:
        payload_bytes: bytes this rank sent, headers of the transport excluded. A collective counts what a
            bandwidth-optimal algorithm sends per rank: 2 (n-1)/n of the vector for a sum, (n-1)/n for a broadcast.
        messages: calls that sent anything.
        exposed_seconds: time spent blocked in `Work.wait`, in seconds.
        by_operation: payload bytes by the name of the call.
        intervals: who talked and waited when; filled only while `tracing`.
    """

    payload_bytes: float = 0.0
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

    def waited(self, operation: str, launched: float, start: float, end: float, step: int) -> None:
        """Count one wait, from `start` to `end`, for a message launched earlier."""
        self.exposed_seconds += end - start
        if self.tracing:
            self.intervals.append(Interval("talk", operation, launched, end, step))
            self.intervals.append(Interval("wait", operation, start, end, step))


def nbytes_of(x: Tensor) -> int:
    """Bytes of data in `x`, also on the meta device."""
    return x.numel() * x.element_size()


def describe(x: Tensor) -> str:
    """The size and dtype of a vector, in words."""
    return f"{x.numel()} x {str(x.dtype).removeprefix('torch.')}"
