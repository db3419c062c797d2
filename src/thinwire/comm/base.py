"""One vocabulary of messages, over any wire.

Every call returns a `Work`: the message is on its way, and `wait()` brings the result. A tensor handed to a call
belongs to the wire until that wait. Bytes are counted here, once, from the tensors themselves, so that every wire
(process group, threads, counter) gives the same figures.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from thinwire.comm.mailbox.base import Mailbox
from thinwire.comm.work import Meter, Work, arrived, nbytes_of
from thinwire.errors import ConfigError

T = TypeVar("T")


class Comm(ABC):
    """The ranks that train together, as one of them sees them.

    All ranks make the same calls in the same order (`exchange`: consistent edges).

    Attributes:
        rank: this worker, from 0.
        size: how many workers there are.
        step: the training step that errors name; kept by the engine.
        deadline_seconds: how long one wait may last.
        meter: bytes and seconds so far.
    """

    def __init__(self, rank: int, size: int, *, deadline_seconds: float = 60.0) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank}: must lie in 0..{size - 1} for {size} workers")
        if deadline_seconds <= 0:
            raise ConfigError(f"deadline_seconds={deadline_seconds}: must be positive; 60 is usual")
        self.rank = rank
        self.size = size
        self.step = 0
        self.deadline_seconds = deadline_seconds
        self.meter = Meter()
        self._mailboxes: WeakKeyDictionary[object, Mailbox] = WeakKeyDictionary()
        self._opened = 0

    def sum_(self, x: Tensor) -> Work[Tensor]:
        """Replace `x` on every rank by its sum over all ranks."""
        if self.size == 1:
            return arrived(x)
        sent = 2 * (self.size - 1) * nbytes_of(x) / self.size
        return self._track("sum", sent, lambda: self._sum_(x))

    def min_(self, x: Tensor) -> Work[Tensor]:
        """Replace `x` on every rank by the least over all ranks, element by element; for a few whole numbers.

        As it is for numbers and not for vectors, its payload counts as one message of the size of `x`.
        """
        if self.size == 1:
            return arrived(x)
        return self._track("min", nbytes_of(x), lambda: self._min_(x))

    def broadcast_(self, x: Tensor, source: int) -> Work[Tensor]:
        """Replace `x` on every rank by the one of rank `source`."""
        if self.size == 1:
            return arrived(x)
        sent = (self.size - 1) * nbytes_of(x) / self.size
        return self._track("broadcast", sent, lambda: self._broadcast_(x, source))

    def gather(self, x: Tensor) -> Work[list[Tensor]]:
        """Every rank's `x`, in the order of ranks; all have the same shape and dtype."""
        if self.size == 1:
            return arrived([x])
        return self._track("gather", (self.size - 1) * nbytes_of(x), lambda: self._gather(x))

    def scatter(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        """Send `xs[j]` to rank j and receive one vector from each rank (an all-to-all).

        Args:
            xs: one vector per rank, of any sizes and one dtype.
            sizes: how many elements come from each rank.
        """
        if len(xs) != self.size or len(sizes) != self.size:
            raise ConfigError(f"scatter of {len(xs)} vectors and {len(sizes)} sizes: {self.size} ranks need one each")
        if self.size == 1:
            return arrived([xs[0]])
        sent = sum(nbytes_of(x) for j, x in enumerate(xs) if j != self.rank)
        return self._track("scatter", sent, lambda: self._scatter(xs, sizes))

    def exchange(self, x: Tensor, to: Sequence[int], frm: Sequence[int]) -> Work[list[Tensor]]:
        """Send `x` to each rank in `to`; receive one vector like `x` from each rank in `frm`, in that order."""
        if self.rank in to or self.rank in frm:
            raise ConfigError(f"exchange of rank {self.rank} with itself: a topology must not contain self-loops")
        if not to and not frm:
            return arrived([])
        return self._track("exchange", len(to) * nbytes_of(x), lambda: self._exchange(x, to, frm))

    def aside(self) -> Comm:
        """Connections of their own among the same ranks, which open them together; they carry tensors of the CPU.

        Calls on them belong to one thread, in one order on all ranks, whatever others call on this comm meanwhile.

        Raises:
            ConfigError: this wire has none to spare.
        """
        raise ConfigError(
            f"{type(self).__name__} has no connections to spare for a thread beside the one that trains; Gloo has: "
            "start the group with init_process_group('gloo') or 'cpu:gloo,cuda:nccl'"
        )

    def open_mailbox(self, owner: object, like: Tensor, *, capacity: int = 4) -> Mailbox:
        """Open the mailbox of `owner`, all ranks together; letters count as exchanges.

        Args:
            owner: whom it is for, such as a replica; one that it had before is closed.
            like: a vector as long as the longest letter, on the device of all.
            capacity: letters that may be under way from one rank to another; whoever posts one more waits.

        Raises:
            ConfigError: this wire carries no letters, or lacks a library for them.
        """
        self.close_mailbox(owner)
        self._opened += 1
        box = self._mailboxes[owner] = self._open_mailbox(self._opened, like, capacity)
        return box

    def mailbox(self, owner: object) -> Mailbox:
        """The mailbox that was opened for `owner`.

        Raises:
            ConfigError: none was, or it has been closed.
        """
        if owner not in self._mailboxes:
            raise ConfigError(f"rank {self.rank}: no mailbox is open for {owner!r}; open_mailbox(...) on all ranks")
        return self._mailboxes[owner]

    def close_mailbox(self, owner: object) -> None:
        """Close the mailbox of `owner`, where it has one; letters to it are lost from now on."""
        if owner in self._mailboxes:
            self._mailboxes.pop(owner).close()

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        raise ConfigError(f"{type(self).__name__} carries no letters; use a process group, threads or a counter")

    def _track(self, operation: str, sent: float, launch: Callable[[], Work[T]]) -> Work[T]:
        """Count the call, launch it, and time the wait for it."""
        self.meter.sent(operation, sent)
        launched, step = time.perf_counter(), self.step
        work = launch()

        def finish() -> T:
            start = time.perf_counter()
            result = work.wait()
            self.meter.waited(operation, launched, start, time.perf_counter(), step)
            return result

        return Work(finish)

    @abstractmethod
    def _sum_(self, x: Tensor) -> Work[Tensor]: ...

    @abstractmethod
    def _min_(self, x: Tensor) -> Work[Tensor]: ...

    @abstractmethod
    def _broadcast_(self, x: Tensor, source: int) -> Work[Tensor]: ...

    @abstractmethod
    def _gather(self, x: Tensor) -> Work[list[Tensor]]: ...

    @abstractmethod
    def _scatter(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]: ...

    @abstractmethod
    def _exchange(self, x: Tensor, to: Sequence[int], frm: Sequence[int]) -> Work[list[Tensor]]: ...
