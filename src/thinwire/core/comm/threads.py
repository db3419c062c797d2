# SPDX-License-Identifier: Apache-2.0
"""Several ranks as threads of one process: for tests, and to run strategies without processes or sockets.

Sums are added in rank order, so a run's values depend only on its inputs.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm, named
from thinwire.core.comm.mailbox.base import Loss, Mailbox, Message
from thinwire.core.comm.work import Work, describe
from thinwire.errors import CommTimeoutError, MismatchError, PeerLostError, ThinwireError, error_named

T = TypeVar("T")
U = TypeVar("U")
Delay = Callable[[int, int, int], int]
"""The delay of a message in steps, as a function of (sender, receiver, step in which it is expected)."""


class Label(NamedTuple):
    """A collective call, which becomes text only in an error; `{}` in its words is the size and dtype of a vector."""

    words: str
    numel: int = 0
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        return self.words.format(f"{self.numel} x {str(self.dtype).removeprefix('torch.')}")


@dataclass(frozen=True)
class Wait:
    """A wait of a rank, which may have timed out.

    Attributes:
        missing: the ranks that it still waits for.
        waiting_for: a description of the wait.
        step: its training step.
    """

    missing: Callable[[], Sequence[int]]
    waiting_for: str | Label
    step: int


@dataclass
class Collective:
    """One collective call: the inputs of the ranks that have joined, and the result.

    Attributes:
        label: the operation, for errors.
        first_rank: the rank that joined first.
        inputs: the inputs, by rank.
        result: computed by the rank that joins last.
    """

    label: Label
    first_rank: int
    inputs: dict[int, Any] = field(default_factory=dict[int, Any])
    result: Any = None


class Hub:
    """The memory that the threads of one run share.

    Args:
        size: the number of threads.
        delay: delays mailbox messages by whole steps; None delivers them at once.

    Attributes:
        lost: the first rank that has failed, and why.
        shared: an error that one rank has detected and all must raise.
        waiting: the current or timed-out waits, by rank.
    """

    def __init__(self, size: int, *, delay: Delay | None = None) -> None:
        self.size = size
        self.delay = delay
        self.mailboxes: dict[tuple[int, int], ThreadMailbox] = {}
        self.changed = threading.Condition()
        self.collectives: dict[int, Collective] = {}
        self.messages: dict[tuple[int, int, int], tuple[int, Tensor]] = {}
        self.lost: tuple[int, BaseException] | None = None
        self.shared: ThinwireError | None = None
        self.waiting: dict[int, Wait] = {}

    def report_failure(self, rank: int, reason: BaseException) -> None:
        """Record that `rank` has failed, so that the waits of all others fail too."""
        with self.changed:
            # The first failure is the cause of the later ones.
            self.lost = self.lost or (rank, reason)
            self.changed.notify_all()

    def share(self, rank: int, error: ThinwireError) -> ThinwireError:
        """Make all waits raise an error of `rank`; return the first such error of any rank."""
        with self.changed:
            first = self.shared = self.shared or error
        self.report_failure(rank, first)
        return first

    def check_lost(self, step: int) -> None:
        """Raise if a rank has failed.

        Raises:
            PeerLostError: with the first rank that failed.
            ThinwireError: the error that a rank shares with all.
        """
        if self.shared is not None:
            raise error_named(type(self.shared).__name__, str(self.shared))
        if self.lost is not None:
            rank, reason = self.lost
            raise PeerLostError(f"rank {rank} was lost at step {step} ({type(reason).__name__}: {reason})")

    def wait_until(self, missing: Callable[[], Sequence[int]], comm: ThreadComm, waiting_for: str | Label) -> None:
        """Wait until `missing()` is empty; the caller holds `changed`."""
        end = time.monotonic() + comm.timeout
        self.waiting[comm.rank] = Wait(missing, waiting_for, comm.step)
        while missing():
            self.check_lost(comm.step)
            # Checked again after a timeout, since it may just have become empty.
            if not self.changed.wait(end - time.monotonic()) and missing():
                if error := self.out_of_step(comm.rank, f"no answer within {comm.timeout:g} s"):
                    comm.raise_on_all(error)
                waited = f"rank {comm.rank} waited {comm.timeout:g} s for {waiting_for} at step {comm.step}"
                raise CommTimeoutError(waited + self.not_answering(comm.rank, waiting_for))
        self.waiting.pop(comm.rank, None)

    def not_answering(self, rank: int, waiting_for: str | Label) -> str:
        """Describe the ranks at the end of a chain of waits, for an error message.

        Args:
            rank: the rank whose wait timed out; its wait stays registered, so that no other rank blames it.
            waiting_for: the wait's description. Nothing is added if it names the right ranks already.
        """
        names = [f"rank {peer}" for peer in sorted(self._waited_for(rank)[1])]
        if not names or all(re.search(rf"{name}\b", str(waiting_for)) for name in names):
            return ""
        return f"; {', '.join(names)} {'is' if len(names) == 1 else 'are'} not answering"

    def out_of_step(self, rank: int, problem: str) -> MismatchError | None:
        """Make the error for ranks that wait for each other; None if no such cycle exists."""
        waiting, running = self._waited_for(rank)
        if running or len(waiting) < 2:
            return None
        groups: dict[str, list[int]] = {}
        # Ranks that wait for these are stuck too.
        for each, wait in sorted(self.waiting.items()):
            if wait.missing():
                groups.setdefault(f"for {wait.waiting_for} at step {wait.step}", []).append(each)
        found = ", ".join(f"{named(ranks)} wait{'s' * (len(ranks) == 1)} {what}" for what, ranks in groups.items())
        return MismatchError(
            f"ranks are out of step: {found}; all ranks must make the same calls after the same steps ({problem})"
        )

    def _waited_for(self, rank: int) -> tuple[set[int], set[int]]:
        """Return the waiting ranks that a rank depends on, including itself, and the ranks they all wait for."""
        waiting, frontier, running = {rank}, [rank], set[int]()
        while frontier:
            for peer in set(self.waiting[frontier.pop()].missing()) - waiting:
                wait = self.waiting.get(peer)
                # A rank whose wait is satisfied is about to continue.
                if wait is None or not wait.missing():
                    running.add(peer)
                else:
                    waiting.add(peer)
                    frontier.append(peer)
        return waiting, running


class ThreadComm(Comm):
    """The comm of one thread; `run_threads` creates it.

    Args:
        hub: shared by the threads.
        rank: the rank of this thread.
        timeout: how long one wait may last, in seconds.

    Example:
        >>> import torch
        >>> from thinwire import ThreadComm, run_threads
        >>> def work(comm: ThreadComm) -> list[float]:
        ...     left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        ...     (received,) = comm.send_recv(torch.tensor([float(comm.rank)]), [right], [left]).wait()
        ...     return received.tolist()
        >>> run_threads(3, work)
        [[2.0], [0.0], [1.0]]
    """

    def __init__(self, hub: Hub, rank: int, *, timeout: float = 60.0) -> None:
        super().__init__(rank, hub.size, timeout=timeout)
        self._hub = hub
        self._calls = 0
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def _all_reduce_(self, x: Tensor) -> Work[Tensor]:
        total = self._join("all_reduce of {}", x, lambda xs: reduce(torch.add, xs))
        return total.then(x.copy_)

    def _broadcast_(self, x: Tensor, src: int) -> Work[Tensor]:
        # The result is a clone: `src` may write to its vector before another rank has copied it.
        chosen = self._join(f"broadcast of {{}} from {src}", x, lambda xs: xs[src].clone())
        return chosen.then(x.copy_)

    def _all_gather(self, x: Tensor) -> Work[list[Tensor]]:
        gathered = self._join("all_gather of {}", x, lambda xs: [each.clone() for each in xs])
        return gathered.then(lambda rows: [row.clone() for row in rows])

    def _all_to_all(self, xs: Sequence[Tensor], sizes: Sequence[int]) -> Work[list[Tensor]]:
        def own_column(rows: list[list[Tensor]]) -> list[Tensor]:
            column = [row[self.rank] for row in rows]
            for peer, (x, size) in enumerate(zip(column, sizes, strict=True)):
                if x.numel() != size:
                    raise MismatchError(f"rank {peer} sends {describe(x)} to rank {self.rank}, which expects {size}")
            return column

        rows = self._join("all_to_all", list(xs), lambda rows: [[x.clone() for x in row] for row in rows])
        return rows.then(own_column)

    def _send_recv(self, x: Tensor, dst: Sequence[int], src: Sequence[int]) -> Work[list[Tensor]]:
        with self._hub.changed:
            for peer in dst:
                self._hub.messages[self.rank, peer, self._sent[peer]] = self.step, x.clone()
                self._sent[peer] += 1
            self._hub.changed.notify_all()
        # Numbered at the call, so that messages match in any order of the waits.
        numbers = [(peer, self._expected[peer]) for peer in src]
        self._expected.update(src)
        step = self.step
        return Work(lambda: [self._receive(peer, number, step, x) for peer, number in numbers])

    def _receive(self, peer: int, number: int, step: int, like: Tensor) -> Tensor:
        key = (peer, self.rank, number)
        with self._hub.changed:
            messages = self._hub.messages
            self._hub.wait_until(lambda: [] if key in messages else [peer], self, f"a message from rank {peer}")
            sent_at, message = self._hub.messages.pop(key)
        if self.in_step and sent_at != step:
            self.raise_on_all(
                MismatchError(
                    f"ranks are out of step: rank {peer} sent a message of step {sent_at}, and rank {self.rank} "
                    f"expects one of step {step}; all ranks must make the same calls after the same steps"
                )
            )
        if message.shape != like.shape or message.dtype != like.dtype:
            raise MismatchError(f"rank {peer} sent {describe(message)}, rank {self.rank} expects {describe(like)}")
        return message

    def raise_on_all(self, error: ThinwireError) -> NoReturn:
        """Raise an error on this rank and in the waits of all others."""
        first = self._hub.share(self.rank, error)
        if first is error:
            raise error
        raise error_named(type(first).__name__, str(first)) from error

    def close(self, reason: BaseException) -> None:
        """Make the waits of all other threads fail."""
        self._hub.report_failure(self.rank, reason)

    def has_failed(self) -> bool:
        """Return True if a rank has failed."""
        return self._hub.lost is not None

    def _open_mailbox(self, epoch: int, like: Tensor, capacity: int) -> Mailbox:
        box = ThreadMailbox(self, self._hub, epoch, like, capacity)
        if self.size > 1:
            # A barrier: no rank may send before all mailboxes are open.
            self._join(f"opening of mailbox {epoch}", None, lambda _: None).wait()
        return box

    def _join(self, words: str, own: T, combine: Callable[[list[T]], U]) -> Work[U]:
        """Join this rank's next collective call; the last rank to join computes the result for all."""
        label = Label(words, own.numel(), own.dtype) if isinstance(own, Tensor) else Label(words)
        hub, call = self._hub, self._calls
        self._calls += 1
        with hub.changed:
            collective = hub.collectives.setdefault(call, Collective(label, self.rank))
            if collective.label != label:
                self.raise_on_all(
                    MismatchError(
                        f"call {call} is {collective.label} on rank {collective.first_rank} and {label} on rank "
                        f"{self.rank}"
                    )
                )
            collective.inputs[self.rank] = own
            if len(collective.inputs) == hub.size:
                collective.result = combine([collective.inputs[rank] for rank in range(hub.size)])
                del hub.collectives[call]
                hub.changed.notify_all()

        def missing() -> list[int]:
            return [rank for rank in range(hub.size) if rank not in collective.inputs]

        def finish() -> U:
            with hub.changed:
                hub.wait_until(missing, self, label._replace(words=f"all ranks to join the {words}"))
            return collective.result

        return Work(finish)


class ThreadMailbox(Mailbox):
    """A mailbox between threads: the sender's thread delivers each message, and runs its handler.

    If the hub has a `delay`, a message that is expected at step s is `ready` from step s + delay on, independent of the
    speed of the threads. `wait` returns it earlier.
    """

    def __init__(self, comm: Comm, hub: Hub, epoch: int, like: Tensor, capacity: int) -> None:
        # All mailboxes share the hub's lock: two locks, held in opposite order by two senders, would deadlock.
        super().__init__(comm, like, capacity, hub.changed)
        self._hub = hub
        self._epoch = epoch
        hub.mailboxes[epoch, comm.rank] = self

    def close(self) -> None:
        """Drop all later messages."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def wait_until(
        self,
        missing: Callable[[], Sequence[int]],
        waiting_for: str,
        *,
        meanwhile: Callable[[], float | None] | None = None,
    ) -> None:
        """Wait until `missing()` is empty; the caller holds `changed`."""
        hub, rank = self._hub, self._rank

        def noted() -> Sequence[int]:
            ranks = missing()
            hub.waiting[rank] = Wait(lambda: ranks, waiting_for, self._comm.step)
            return ranks

        try:
            super().wait_until(noted, waiting_for, meanwhile=meanwhile)
        except CommTimeoutError as error:
            raise CommTimeoutError(f"{error}{hub.not_answering(rank, str(error))}") from None
        hub.waiting.pop(rank, None)

    def _transmit(self, dst: int, message: Message, number: int) -> None:
        peer = self._hub.mailboxes[self._epoch, dst]
        if not peer._closed:
            peer._deliver(message._replace(content=message.content.clone()), number)

    def _acknowledge(self, src: int, consumed: int) -> None:
        self._hub.mailboxes[self._epoch, src]._on_acknowledgement(self._rank, consumed)

    def _has_arrived(self, src: int, number: int, step: int) -> bool:
        if self._hub.delay is None:
            return super()._has_arrived(src, number, step)
        return self._comm.step >= step + self._hub.delay(src, self._rank, step)

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank has closed its mailbox: all threads belong to one process."""
        return self._hub.mailboxes[self._epoch, rank]._closed

    def _check_usable(self) -> None:
        super()._check_usable()
        self._hub.check_lost(self._comm.step)

    def _loss_of(self, rank: int) -> Loss | None:
        if self._hub.mailboxes[self._epoch, rank]._closed:
            return Loss(f"rank {rank} has closed its mailbox. End training on all ranks together", closed=True)
        return None


def single_worker() -> Comm:
    """Make the comm of a single worker."""
    return ThreadComm(Hub(1), 0)


def run_threads(size: int, work: Callable[[Comm], T], *, timeout: float = 60.0, delay: Delay | None = None) -> list[T]:
    """Run `work(comm)` on `size` threads and return the results in rank order.

    Args:
        size: the number of threads.
        work: the function that each thread runs.
        timeout: how long one wait may last, in seconds.
        delay: the delay of a mailbox message in steps, as a function of (sender, receiver, step); None delivers
            messages at once.

    Raises:
        Exception: the first failure of any thread; waits of the other threads then fail too.

    Example:
        >>> import torch
        >>> from thinwire import run_threads
        >>> run_threads(2, lambda comm: comm.all_reduce_(torch.tensor([comm.rank + 1])).wait().item())
        [3, 3]
    """
    hub = Hub(size, delay=delay)

    # Torch has one thread for all backward passes on a GPU. At the end of a pass it would wait for the other ranks,
    # whose passes could then not run. Therefore each pass runs in its rank's thread.
    def body(rank: int) -> T:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                return work(ThreadComm(hub, rank, timeout=timeout))
        except BaseException as error:
            # Any exception must end the waits of the others, which would otherwise last until the timeout.
            hub.report_failure(rank, error)
            raise

    with ThreadPoolExecutor(size, thread_name_prefix="thinwire-rank") as pool:
        futures = [pool.submit(body, rank) for rank in range(size)]
    # All ranks may have handled an error that one of them shared.
    if hub.lost is not None and any(future.exception() for future in futures):
        raise hub.lost[1]
    return [future.result() for future in futures]
