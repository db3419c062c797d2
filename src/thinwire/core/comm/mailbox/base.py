# SPDX-License-Identifier: Apache-2.0
"""Point-to-point messages without a matching call on the other rank.

Each pair of ranks has an edge in each direction. Messages of an edge are numbered and delivered once, in order. At most
`capacity` messages of an edge may be sent and not yet consumed, which bounds the memory: a further send waits until the
receiver acknowledges some. Every wait has the comm's timeout.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.core.comm.runtime import Condition, Runtime
from thinwire.core.comm.work import Meter, Work, describe
from thinwire.errors import CommError, CommTimeoutError, ConfigError, MismatchError, PeerLostError, ThinwireError

_MIN_BYTES = 64  # always allowed, for messages that carry a single number
_POLL_SECONDS = 0.2  # how often a wait checks whether the other rank is still connected


class Message(NamedTuple):
    """A vector from one rank to another.

    Attributes:
        src: the rank that sent it.
        step: the sender's step at the send.
        topic: a number that the strategy chooses; 0 is for `expect`, others have handlers.
        content: the vector.
    """

    src: int
    step: int
    topic: int
    content: Tensor


Handler = Callable[[Message], bool]


class Endpoint(Protocol):
    """The part of `Comm` that a mailbox needs; `Comm` itself imports this module."""

    rank: int
    size: int
    step: int
    timeout: float
    meter: Meter
    runtime: Runtime

    def failure(self, call: str, problem: str, *, late: bool, closed: bool = False) -> ThinwireError:
        """Make the error for a wait that failed because of other ranks."""
        ...

    def name(self, rank: int) -> str:
        """Return a rank for an error message."""
        ...

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process is known to have ended."""
        ...


@dataclass
class Edge:
    """One rank's counters and queues for one other rank.

    Attributes:
        sent: messages sent to the other rank.
        acknowledged: how many of these the other rank has consumed, by its last acknowledgement.
        received: messages from the other rank that were delivered in order.
        out_of_order: messages from the other rank that overtook earlier ones, by number.
        consumed: received messages that were used here.
        reported: how many of these were acknowledged.
        expected: calls of `expect` for the other rank.
        queued: messages of topic 0 delivered so far.
        inbox: messages of topic 0 that are not consumed yet, by number.
    """

    sent: int = 0
    acknowledged: int = 0
    received: int = 0
    out_of_order: dict[int, Message] = field(default_factory=dict[int, Message])
    consumed: int = 0
    reported: int = 0
    expected: int = 0
    queued: int = 0
    inbox: dict[int, Message] = field(default_factory=dict[int, Message])


class Loss(NamedTuple):
    """The loss of a rank.

    Attributes:
        problem: a description.
        closed: whether the rank announced its end, which does not imply a failure.
    """

    problem: str
    closed: bool = False


class TopicHandler(NamedTuple):
    """The handler of a topic, and which messages it accepts."""

    handler: Handler
    like: Tensor
    src: tuple[int, ...]


class Mailbox(ABC):
    """One rank's messages to and from all others, for one owner.

    Attributes:
        changed: the one lock of the mailbox, notified of every change. A strategy whose vectors are used in handlers
            holds it while it reads or writes them.
        duplicates: messages that arrived twice and were dropped the second time.
        capacity: unconsumed messages allowed on one edge.
        clock: the clock for timeouts, in seconds.
        tolerant: whether the owner continues without lost ranks. Their loss is then not an error by itself, and
            messages to them are dropped. The owner checks `lost_among` and calls `dismiss`; a wait for a dismissed rank
            fails.
    """

    def __init__(self, comm: Endpoint, like: Tensor, capacity: int, changed: Condition) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity}: must be at least 1 message. 4 is usual")
        self.changed = changed
        self.capacity = capacity
        self.duplicates = 0
        self.tolerant = False
        self._dismissed: set[int] = set()
        self.clock: Callable[[], float] = comm.runtime.clock
        self._rank, self._size = comm.rank, comm.size
        self._comm = comm
        self._max_bytes = max(_MIN_BYTES, like.nbytes)
        # Created at first use: of thousands of ranks most never exchange a message.
        self._edges: defaultdict[int, Edge] = defaultdict(Edge)
        self._handlers: dict[int, TopicHandler] = {}
        self._deferred: list[Message] = []
        self._closed = False
        self._fault: Exception | None = None
        self._owner_thread = threading.get_ident()
        self._unmetered: list[int] = []
        self._device = like.device
        self._stream: torch.cuda.Stream | None = None
        self.follow_stream()

    # -- for strategies ------------------------------------------------------------------------------------------

    def send(self, dst: int, x: Tensor, *, topic: int = 0) -> None:
        """Send a copy of `x` to one rank; wait only while `capacity` messages to it are unconsumed.

        Args:
            dst: the rank.
            x: a vector; you may change it as soon as the call returns.
            topic: 0 for a message that the other rank receives with `expect`; other topics go to its handlers.

        Raises:
            ConfigError: `dst` is this rank or invalid, or `x` is longer than the mailbox allows.
            CommTimeoutError: the other rank consumed no message within the timeout.
            PeerLostError: the other rank is known to be gone.
        """
        if dst == self._rank or not 0 <= dst < self._size:
            raise ConfigError(
                f"a message from rank {self._rank} to rank {dst}: the destination must be another of "
                f"0..{self._size - 1}"
            )
        if x.nbytes > self._max_bytes:
            raise ConfigError(f"a message of {x.nbytes} bytes: this mailbox was opened for at most {self._max_bytes}")
        with self.changed:
            if self._drops(dst):
                return
            edge, start = self._edges[dst], self.clock()
            full = edge.sent - edge.acknowledged >= self.capacity
            self._check_peers([dst])
            self.wait_until(
                lambda: [dst] if edge.sent - edge.acknowledged >= self.capacity and not self._drops(dst) else [],
                f"room for a message to {self._name(dst)}",
            )
            number, edge.sent = edge.sent, edge.sent + 1
            self._transmit(dst, Message(self._rank, self._comm.step, topic, x), number)
            self._count(x.nbytes)
        if full:
            self._comm.meter.waited("room", start, start, self.clock(), self._comm.step)

    def expect(self, src: int, like: Tensor) -> Work[Message]:
        """Receive the next message of topic 0 from one rank.

        Messages of one rank match these calls in order.

        Args:
            src: the rank.
            like: a vector with the size, dtype and device of the content.

        Returns:
            A handle whose `ready` shows whether the message has arrived. `ready` and `wait` raise CommTimeoutError,
            PeerLostError, or MismatchError if the vector has another size or dtype.
        """
        edge, step, launched = self._edges[src], self._comm.step, self.clock()
        number, edge.expected = edge.expected, edge.expected + 1

        def receive() -> Message:
            start = self.clock()
            with self.changed:
                self.wait_until(lambda: [] if number in edge.inbox else [src], f"a message from {self._name(src)}")
                message = edge.inbox.pop(number)
                self._mark_consumed(message)
            self._comm.meter.waited("message", launched, start, self.clock(), step)
            return self._checked(message, like)

        def is_ready() -> bool:
            with self.changed:
                if self._has_arrived(src, number, step):
                    return True
                if number not in edge.inbox:
                    self._check_peers([src])
            if self.clock() - launched > self._comm.timeout:
                raise self._timeout_error(f"a message from {self._name(src)}")
            return False

        return Work(receive, is_ready)

    def on_message(self, topic: int, handler: Handler, *, like: Tensor, src: Sequence[int]) -> None:
        """Register the handler of a topic; it is called with each message on arrival, in any thread.

        Args:
            topic: not 0.
            handler: called with the message while `changed` is held; must not block. Returning False defers the message
                until `process_deferred`.
            like: a vector with the size, dtype and device of the content.
            src: the ranks that may send on this topic.
        """
        with self.changed:
            self._handlers[topic] = TopicHandler(handler, like, tuple(src))
            self._handle_deferred()

    def follow_stream(self) -> None:
        """Record the current CUDA stream of the owner's thread; no effect in other threads or without a GPU."""
        if self._device.type == "cuda" and threading.get_ident() == self._owner_thread:
            self._stream = torch.cuda.current_stream(self._device)

    @contextmanager
    def in_thread_of_owner(self) -> Generator[None]:
        """Treat this thread as the owner's while the owner's own thread waits for it.

        A backward pass on a GPU ends in a thread of autograd, whose errors belong to the training.
        """
        before, self._owner_thread = self._owner_thread, threading.get_ident()
        try:
            yield
        finally:
            self._owner_thread = before

    def in_stream_of_owner(self) -> AbstractContextManager[object]:
        """Select the owner's device and stream for work on its vectors in another thread.

        Each thread has its own current device and stream. Without this, work would run on the first GPU, in a stream
        that does not wait for the work of the owner's thread.
        """
        if self._stream is None or threading.get_ident() == self._owner_thread:
            return nullcontext()
        return torch.cuda.stream(self._stream)

    def process_deferred(self) -> None:
        """Call handlers again for deferred messages, and raise errors of other threads."""
        with self.changed:
            self._handle_deferred()
            self._flush_meter()
            self._check_peers(())

    def wait_until(
        self,
        missing: Callable[[], Sequence[int]],
        waiting_for: str,
        *,
        meanwhile: Callable[[], float | None] | None = None,
    ) -> None:
        """Wait until `missing()` is empty; the caller holds `changed`.

        Args:
            missing: returns the ranks that the caller still waits for; called after every change.
            waiting_for: a description for the error; "{ranks}" in it is replaced by the missing ranks.
            meanwhile: does work that is due while ranks are missing, and returns the seconds until its next call; None
                waits for a change.

        Raises:
            CommTimeoutError: some rank was still missing after the timeout.
            PeerLostError: one of the missing ranks is gone.
        """
        end = self.clock() + self._comm.timeout
        while ranks := missing():
            due = None
            if meanwhile is not None:
                due = meanwhile()
                if not (ranks := missing()):
                    break  # its work may have completed the wait without a notification
            self._check_peers([rank for rank in ranks if rank != self._rank])
            left = end - self.clock()
            if left <= 0:
                named = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                raise self._timeout_error(waiting_for.replace("{ranks}", named))
            # A closed connection may not notify, so the wait is short and the connection is checked again.
            self.changed.wait(min(left, _POLL_SECONDS, _POLL_SECONDS if due is None else due))
        if threading.get_ident() == self._owner_thread:
            self._flush_meter()

    def lost_among(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks among these that are gone."""
        return [rank for rank in ranks if rank in self._dismissed or self._loss_of(rank) is not None]

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank's process has ended or its mailbox is closed, as far as is known."""
        return self._comm.has_ended(rank)

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Treat these ranks as lost from now on, even if a failed link recovers later."""
        with self.changed:
            self._dismissed.update(ranks)

    def tell_failure(self) -> None:
        """Report this rank's failure to ranks that would not notice it."""

    @abstractmethod
    def close(self) -> None:
        """Notify the other ranks and release all resources; a second call has no effect."""

    # -- for backends --------------------------------------------------------------------------------------------

    @abstractmethod
    def _transmit(self, dst: int, message: Message, number: int) -> None:
        """Send a copy of a message without blocking; called while `changed` is held."""

    @abstractmethod
    def _acknowledge(self, src: int, consumed: int) -> None:
        """Report to a rank how many of its messages were consumed here."""

    def _check_peers(self, src: Sequence[int]) -> None:
        """Raise if messages have failed, or if a rank is gone (dismissed, if the mailbox is tolerant)."""
        self._check_usable()
        for rank in src:
            loss = self._loss_of(rank)
            if self.tolerant:
                loss = (loss or Loss(f"{self._name(rank)} was lost before")) if rank in self._dismissed else None
            if loss is not None:
                raise self._lost_error(loss.problem, closed=loss.closed)

    def _check_usable(self) -> None:
        """Raise if this mailbox has failed or is closed; backends also raise if all ranks must fail."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise CommError(f"{self._name(self._rank)}: this mailbox is closed. Attach the model again")

    def _loss_of(self, rank: int) -> Loss | None:
        """Return how a rank was lost; None if it is not known to be lost."""
        return None

    def _drops(self, dst: int) -> bool:
        """Return True if messages to a rank are dropped."""
        return self.tolerant and bool(self.lost_among([dst]))

    def _has_arrived(self, src: int, number: int, step: int) -> bool:
        return number in self._edges[src].inbox

    def _deliver(self, message: Message, number: int) -> None:
        """Accept a message from the network, which may be out of order or a duplicate."""
        with self.changed:
            if message.src in self._dismissed:
                return
            edge = self._edges[message.src]
            if number < edge.received or number in edge.out_of_order:
                self.duplicates += 1
                return
            # No sender may be this far ahead of the missing message, so it will never arrive.
            if number >= edge.received + self.capacity:
                self._fail(
                    CommError(
                        f"{self._name(self._rank)}: message {edge.received} of {self._name(message.src)} was lost on "
                        "the way"
                    )
                )
                return
            # A correct sender waits for acknowledgements, so the number of its messages here is bounded.
            if number >= edge.consumed + self.capacity:
                self._fail(
                    CommError(
                        f"{self._name(self._rank)}: {self._name(message.src)} sent more than {self.capacity} "
                        "messages that were not consumed yet. All ranks must run the same version"
                    )
                )
                return
            edge.out_of_order[number] = message
            while edge.received in edge.out_of_order:
                following = edge.out_of_order.pop(edge.received)
                edge.received += 1
                if following.topic:
                    self._handle(following)
                else:
                    edge.inbox[edge.queued] = following
                    edge.queued += 1
            self.changed.notify_all()

    def _handle(self, message: Message) -> None:
        """Call the handler of a message, or defer it; raise errors on this rank, not on the sender."""
        entry = self._handlers.get(message.topic)
        if entry is None:
            self._deferred.append(message)
            return
        try:
            if message.src not in entry.src:
                raise MismatchError(
                    f"{self._name(self._rank)}: no handler accepts messages on topic {message.topic} from "
                    f"{self._name(message.src)}"
                )
            with torch.no_grad(), self.in_stream_of_owner():
                done = entry.handler(message._replace(content=self._checked(message, entry.like).content))
        except Exception as error:
            # This may be the receiving thread, where an error would be lost; the next call raises it instead.
            self._fail(error)
            return
        if done:
            self._mark_consumed(message)
        else:
            self._deferred.append(message)

    def _handle_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for message in deferred:
            self._handle(message)

    def _mark_consumed(self, message: Message) -> None:
        edge = self._edges[message.src]
        edge.consumed += 1
        # Each acknowledgement wakes the sender, so large mailboxes acknowledge a quarter of their capacity at a time.
        if edge.consumed - edge.reported >= max(1, self.capacity // 4):
            edge.reported = edge.consumed
            self._acknowledge(message.src, edge.consumed)

    def _on_acknowledgement(self, dst: int, consumed: int) -> None:
        with self.changed:
            edge = self._edges[dst]
            # Acknowledgements may overtake each other, and must never exceed what was sent.
            edge.acknowledged = max(edge.acknowledged, min(consumed, edge.sent))
            self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Keep the first error, which the next call raises."""
        with self.changed:
            self._fault = self._fault or error
            self.changed.notify_all()

    def _checked(self, message: Message, like: Tensor) -> Message:
        x = message.content
        if x.numel() != like.numel() or x.dtype != like.dtype:
            raise MismatchError(
                f"{self._name(message.src)} sent {describe(x)} at its step {message.step}, "
                f"{self._name(self._rank)} expects {describe(like)}"
            )
        return message if x.device == like.device else message._replace(content=x.to(like.device))

    def _timeout_error(self, waiting_for: str) -> ThinwireError:
        if threading.get_ident() != self._owner_thread:
            seconds, step = self._comm.timeout, self._comm.step
            return CommTimeoutError(f"{self._name(self._rank)} waited {seconds:g} s for {waiting_for} at step {step}")
        return self._comm.failure(waiting_for, "", late=True)

    def _name(self, rank: int) -> str:
        return self._comm.name(rank)

    def _lost_error(self, problem: str, *, closed: bool = False) -> ThinwireError:
        """Make the error for a rank that is gone."""
        if threading.get_ident() != self._owner_thread:
            # Training may be over, and the other rank may have ended normally; the training thread checks otherwise.
            return PeerLostError(f"{self._name(self._rank)}, step {self._comm.step}: {problem}")
        return self._comm.failure("messages", problem, late=False, closed=closed)

    def _count(self, nbytes: int) -> None:
        """Count a message; one sent from another thread is counted at the next call of the owner's thread."""
        self._unmetered.append(nbytes)
        if threading.get_ident() == self._owner_thread:
            self._flush_meter()

    def _flush_meter(self) -> None:
        for nbytes in self._unmetered:
            self._comm.meter.sent("send_recv", nbytes)
        self._unmetered.clear()
