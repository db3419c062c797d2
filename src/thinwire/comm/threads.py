"""N workers as N threads of one process: the same strategies, without processes or sockets.

Sums are added in the order of ranks, so a run's values depend on nothing but its inputs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.comm.mailbox.base import Mailbox, Message
from thinwire.comm.work import Work, describe
from thinwire.errors import CommTimeoutError, MismatchError, PeerLostError

T = TypeVar("T")
U = TypeVar("U")
Delay = Callable[[int, int, int], int]
"""Steps that a message is under way: of (from, to, step in which it is expected)."""


@dataclass
class Meeting:
    """One collective call: what each rank brought, and what they made of it together."""

    label: str
    first: int
    brought: dict[int, Any] = field(default_factory=dict[int, Any])
    result: Any = None


class Hub:
    """The room in which the threads of one run meet.

    Args:
        size: how many threads.
        delay: lets messages be under way for whole steps; None hands them over at once.
    """

    def __init__(self, size: int, *, delay: Delay | None = None) -> None:
        self.size = size
        self.delay = delay
        self.mailboxes: dict[tuple[int, int], ThreadMailbox] = {}
        self.changed = threading.Condition()
        self.meetings: dict[int, Meeting] = {}
        self.messages: dict[tuple[int, int, int], Tensor] = {}
        self.lost: tuple[int, BaseException] | None = None

    def lose(self, rank: int, reason: BaseException) -> None:
        """Tell everyone that `rank` has failed."""
        with self.changed:
            self.lost = self.lost or (rank, reason)
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool], comm: ThreadComm, waiting_for: str) -> None:
        """Sleep until `ready()`; the condition's lock is held by the caller."""
        end = time.monotonic() + comm.timeout
        while not ready():
            if self.lost is not None:
                rank, reason = self.lost
                raise PeerLostError(f"rank {rank} was lost at step {comm.step} ({type(reason).__name__}: {reason})")
            if not self.changed.wait(end - time.monotonic()) and not ready():
                raise CommTimeoutError(
                    f"rank {comm.rank} waited {comm.timeout:g} s for {waiting_for} at step {comm.step}"
                )


class ThreadComm(Comm):
    """One thread's view of its `Hub`."""

    def __init__(self, hub: Hub, rank: int, *, timeout: float = 60.0) -> None:
        super().__init__(rank, hub.size, timeout=timeout)
        self._hub = hub
        self._calls = 0
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        total = self._meet(f"all_reduce of {describe(x)}", x, lambda xs: reduce(torch.add, xs))
        return total.then(x.copy_)

    def _all_reduce_min_(self, x: Tensor) -> Work[Tensor]:
        least = self._meet(f"all_reduce_min of {describe(x)}", x, lambda xs: reduce(torch.minimum, xs).clone())
        return least.then(x.copy_)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        chosen = self._meet(f"broadcast of {describe(x)} from {src}", x, lambda xs: xs[src].clone())
        return chosen.then(x.copy_)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        rows = self._meet(f"all_gather of {describe(x)}", x, lambda xs: [each.clone() for each in xs])
        return rows.then(lambda everyone: [row.clone() for row in everyone])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        rows = self._meet("all_to_all", list(xs), lambda rows: [[x.clone() for x in row] for row in rows])
        return rows.then(lambda everyone: self._pick(everyone, sizes))

    def _pick(self, rows: list[list[Tensor]], sizes: Sequence[int]) -> list[Tensor]:
        mine = [row[self.rank] for row in rows]
        for peer, (x, size) in enumerate(zip(mine, sizes, strict=True)):
            if x.numel() != size:
                raise MismatchError(f"rank {peer} scatters {describe(x)} to rank {self.rank}, which expects {size}")
        return mine

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        with self._hub.changed:
            for peer in dst:
                self._hub.messages[self.rank, peer, self._sent[peer]] = x.clone()
                self._sent[peer] += 1
            self._hub.changed.notify_all()
        numbers = [(peer, self._expected[peer]) for peer in src]
        self._expected.update(src)  # settled now, in whatever order the waits will be
        return Work(lambda: [self._letter(peer, number, x) for peer, number in numbers])

    def _letter(self, peer: int, number: int, like: Tensor) -> Tensor:
        place = (peer, self.rank, number)
        with self._hub.changed:
            self._hub.until(lambda: place in self._hub.messages, self, f"a message from rank {peer}")
            message = self._hub.messages.pop(place)
        if message.shape != like.shape or message.dtype != like.dtype:
            raise MismatchError(f"rank {peer} sent {describe(message)}, rank {self.rank} expects {describe(like)}")
        return message

    def duplicate(self) -> Comm:
        """Another hub for the same threads."""
        hub = self._meet("opening of an aside", None, lambda _: Hub(self.size)).wait()
        return ThreadComm(hub, self.rank, timeout=self.timeout)

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        box = ThreadMailbox(self, self._hub, epoch, like, capacity)
        if self.size > 1:
            self._meet(f"opening of mailbox {epoch}", None, lambda _: None).wait()
        return box

    def _meet(self, label: str, brought: T, together: Callable[[list[T]], U]) -> Work[U]:
        """Bring something to this rank's next round; the last to arrive computes the result for all."""
        hub, call = self._hub, self._calls
        self._calls += 1
        with hub.changed:
            meeting = hub.meetings.setdefault(call, Meeting(label, self.rank))
            if meeting.label != label:
                raise MismatchError(
                    f"call {call} is {meeting.label} on rank {meeting.first} and {label} on rank {self.rank}"
                )
            meeting.brought[self.rank] = brought
            if len(meeting.brought) == hub.size:
                meeting.result = together([meeting.brought[rank] for rank in range(hub.size)])
                del hub.meetings[call]
                hub.changed.notify_all()

        def finish() -> U:
            with hub.changed:
                hub.until(lambda: len(meeting.brought) == hub.size, self, f"everyone to join the {label}")
            return meeting.result

        return Work(finish)


class ThreadMailbox(Mailbox):
    """Messages between threads: the writer's thread hands each over, and has it answered.

    With a scripted `delay` of the hub, a message that is expected at step s is `ready` from step s + delay on, and then
    always, whichever thread is the faster. Waiting for it takes it sooner.
    """

    def __init__(self, comm: Comm, hub: Hub, epoch: int, like: Tensor, capacity: int) -> None:
        super().__init__(comm, like, capacity, hub.changed)
        self._hub = hub
        self._epoch = epoch
        hub.mailboxes[epoch, comm.rank] = self

    def close(self) -> None:
        """Take no more messages."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def _carry(self, dst: int, message: Message, number: int) -> None:
        peer = self._hub.mailboxes[self._epoch, dst]
        if not peer._closed:
            peer._deliver(message._replace(content=message.content.clone()), number)

    def _make_room(self, src: int, taken: int) -> None:
        self._hub.mailboxes[self._epoch, src]._room_was_made(self._rank, taken)

    def _has_come(self, src: int, number: int, step: int) -> bool:
        if self._hub.delay is None:
            return super()._has_come(src, number, step)
        return self._comm.step >= step + self._hub.delay(src, self._rank, step)

    def _complain(self, src: Sequence[int]) -> None:
        super()._complain(src)
        if self._hub.lost is not None:
            rank, reason = self._hub.lost
            raise PeerLostError(f"rank {rank} was lost at step {self._comm.step} ({type(reason).__name__}: {reason})")
        for rank in src:
            if self._hub.mailboxes[self._epoch, rank]._closed:
                raise PeerLostError(f"rank {self._rank}: rank {rank} has closed its mailbox; end training together")


def alone() -> Comm:
    """A world of one worker."""
    return ThreadComm(Hub(1), 0)


def run_threads(size: int, work: Callable[[Comm], T], *, timeout: float = 60.0, delay: Delay | None = None) -> list[T]:
    """Run `work(comm)` on `size` threads and return the results in the order of ranks.

    Args:
        size: how many threads.
        work: what each does.
        timeout: how long one wait may last.
        delay: steps that a message from one rank to another is under way, by (from, to, step); None hands messages over
            at once.

    Raises:
        Exception: the first failure of any thread; the others are told and end too.
    """
    hub = Hub(size, delay=delay)

    def body(rank: int) -> T:
        try:
            return work(ThreadComm(hub, rank, timeout=timeout))
        except BaseException as error:
            hub.lose(rank, error)
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="thinwire-rank") as pool:
        futures = [pool.submit(body, rank) for rank in range(size)]
    if hub.lost is not None:
        raise hub.lost[1]
    return [future.result() for future in futures]
