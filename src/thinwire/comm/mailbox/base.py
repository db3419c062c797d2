"""Messages: what one rank says to another without a common schedule.

Each pair of ranks has an edge in either direction. Messages of an edge are numbered and arrive in that order, each
once. An edge holds at most `capacity` messages that were posted and not yet taken, so that memory is bounded by
design and not by luck: whoever posts one more waits for room. Every wait has the comm's deadline.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thinwire.comm.work import Meter, Work, describe, nbytes_of
from thinwire.errors import CommError, CommTimeoutError, ConfigError, MismatchError

_LEAST_BYTES = 64  # always allowed, for messages that carry a number
_LOOK_SECONDS = 0.2  # how often a wait asks whether the peer is still there


class Message(NamedTuple):
    """A vector from one rank to another.

    Attributes:
        src: the rank that posted it.
        step: that rank's step then.
        topic: what it is about, as the strategy numbers it; 0 is what `expect` expects.
        content: the vector.
    """

    src: int
    step: int
    topic: int
    content: Tensor


Handler = Callable[[Message], bool]


class Endpoint(Protocol):
    """What a mailbox needs of the `Comm` that opens it; `Comm` itself imports this module."""

    rank: int
    size: int
    step: int
    timeout: float
    meter: Meter


@dataclass
class Edge:
    """What one rank knows of its messages with one other.

    Attributes:
        posted: messages to it.
        room_made: how many of those it has taken.
        heard: messages from it that have come in order.
        early: messages from it that came before others that they follow, by number.
        taken: messages from it that were used here.
        told: how many of those it knows of.
        promised: messages of topic 0 that somebody here expects or has had.
        filed: how many of topic 0 have come.
        inbox: those that nobody has taken yet, by number.
    """

    posted: int = 0
    room_made: int = 0
    heard: int = 0
    early: dict[int, Message] = field(default_factory=dict[int, Message])
    taken: int = 0
    told: int = 0
    promised: int = 0
    filed: int = 0
    inbox: dict[int, Message] = field(default_factory=dict[int, Message])


class TopicHandler(NamedTuple):
    """Who answers the messages of one topic, and which messages those are."""

    handler: Handler
    like: Tensor
    src: tuple[int, ...]


class Mailbox(ABC):
    """One rank's messages with all others, for one owner.

    Attributes:
        changed: the one lock of everything here, and told of every change. A strategy whose vectors are used in
            answers holds it while it touches them.
        duplicates: messages that came twice and were dropped the second time.
        capacity: messages that may be under way on one edge.
    """

    def __init__(self, comm: Endpoint, like: Tensor, capacity: int, changed: threading.Condition) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity}: must be at least 1 message; 4 is usual")
        self.changed = changed
        self.capacity = capacity
        self.duplicates = 0
        self._rank, self._size = comm.rank, comm.size
        self._comm = comm
        self._largest = max(_LEAST_BYTES, nbytes_of(like))
        self._edges = {rank: Edge() for rank in range(comm.size) if rank != comm.rank}
        self._handlers: dict[int, TopicHandler] = {}
        self._held: list[Message] = []
        self._closed = False
        self._fault: Exception | None = None
        self._home = threading.get_ident()
        self._untold: list[int] = []

    # -- for strategies ------------------------------------------------------------------------------------------

    def send(self, dst: int, x: Tensor, *, topic: int = 0) -> None:
        """Send a copy of `x` to one rank; waits only while `capacity` messages to it have not been taken.

        Args:
            dst: the rank.
            x: a vector; may change as soon as the call returns.
            topic: what it is about; 0 is what the other rank expects, others are answered.

        Raises:
            ConfigError: to itself, to nobody, or longer than the mailbox was opened for.
            CommTimeoutError: no message of an earlier time was taken.
            PeerLostError: the other rank is known to be gone.
        """
        if dst not in self._edges or nbytes_of(x) > self._largest:
            raise self._cannot_send(dst, x)
        with self.changed:
            edge, start = self._edges[dst], time.perf_counter()
            full = edge.posted - edge.room_made >= self.capacity
            self._complain([dst])
            self.until(
                lambda: [dst] if edge.posted - edge.room_made >= self.capacity else [],
                f"room for a message to rank {dst}",
            )
            number, edge.posted = edge.posted, edge.posted + 1
            self._carry(dst, Message(self._rank, self._comm.step, topic, x), number)
            self._count(nbytes_of(x))
        if full:
            self._comm.meter.waited("room", start, start, time.perf_counter(), self._comm.step)

    def expect(self, src: int, like: Tensor) -> Work[Message]:
        """The next message of topic 0 from one rank, when it comes; `ready` says whether it has, or never will.

        Messages of one rank come in the order in which they were posted, and belong to these calls in theirs.

        Args:
            src: the rank.
            like: a vector of the size, dtype and device that the content will have.

        Returns:
            Work that raises, when it is asked or waited for, CommTimeoutError, PeerLostError, or MismatchError where
            another kind of vector came.
        """
        edge, step, launched = self._edges[src], self._comm.step, time.perf_counter()
        number, edge.promised = edge.promised, edge.promised + 1

        def take() -> Message:
            start = time.perf_counter()
            with self.changed:
                self.until(lambda: [] if number in edge.inbox else [src], f"a message from rank {src}")
                message = edge.inbox.pop(number)
                self._took(message)
            self._comm.meter.waited("message", launched, start, time.perf_counter(), step)
            return self._checked(message, like)

        def is_here() -> bool:
            with self.changed:
                if self._has_come(src, number, step):
                    return True
                if number not in edge.inbox:
                    self._complain([src])
            if time.perf_counter() - launched > self._comm.timeout:
                raise self._late(f"a message from rank {src}")
            return False

        return Work(take, is_here)

    def answer(self, topic: int, handler: Handler, *, like: Tensor, src: Sequence[int]) -> None:
        """Hand every message of a topic to `handler` as soon as it comes, in whatever thread it comes in.

        Args:
            topic: not 0.
            handler: called with the message, under `changed`; must not wait. False puts the message aside until
                `retry`.
            like: a vector of the size, dtype and device of the content.
            src: who may write on this topic.
        """
        with self.changed:
            self._handlers[topic] = TopicHandler(handler, like, tuple(src))
            self._offer()

    def retry(self) -> None:
        """Offer messages that were put aside once more, and raise what has gone wrong with others meanwhile."""
        with self.changed:
            self._offer()
            self._tell()
            self._complain(())

    def _offer(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._handle(message)

    def until(self, missing: Callable[[], Sequence[int]], waiting_for: str) -> None:
        """Wait until no rank is missing, as messages will have it; the caller holds `changed`.

        Args:
            missing: the ranks from which something has yet to come; asked whenever anything has.
            waiting_for: what that is, in words, for the error.

        Raises:
            CommTimeoutError: it did not come in time.
            PeerLostError: one of those ranks is gone.
        """
        end = time.monotonic() + self._comm.timeout
        while ranks := missing():
            self._complain(ranks)
            left = end - time.monotonic()
            if left <= 0:
                raise self._late(waiting_for)
            self.changed.wait(min(left, _LOOK_SECONDS))
        if threading.get_ident() == self._home:
            self._tell()

    @abstractmethod
    def close(self) -> None:
        """Say goodbye and let go of everything; again is nothing."""

    # -- for wires -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _carry(self, dst: int, message: Message, number: int) -> None:
        """Send a copy of a message; called under `changed`, never to wait."""

    @abstractmethod
    def _make_room(self, src: int, taken: int) -> None:
        """Tell a rank how many of its messages have been taken."""

    def _complain(self, src: Sequence[int]) -> None:
        """Raise what stands in the way of hearing from these ranks."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise CommError(f"rank {self._rank}: this mailbox is closed; attach the model again")

    def _has_come(self, src: int, number: int, step: int) -> bool:
        return number in self._edges[src].inbox

    def _deliver(self, message: Message, number: int) -> None:
        """A message has come, in whatever order and however often."""
        with self.changed:
            edge = self._edges[message.src]
            if number < edge.heard or number in edge.early:
                self.duplicates += 1
                return
            if number >= edge.heard + self.capacity:
                self._fail(
                    CommError(f"rank {self._rank}: message {edge.heard} of rank {message.src} was lost on the way")
                )
                return
            edge.early[number] = message
            while edge.heard in edge.early:
                following = edge.early.pop(edge.heard)
                edge.heard += 1
                self._file(following)
            self.changed.notify_all()

    def _file(self, message: Message) -> None:
        if message.topic:
            self._handle(message)
            return
        edge = self._edges[message.src]
        edge.inbox[edge.filed] = message
        edge.filed += 1

    def _handle(self, message: Message) -> None:
        """Answer a message, or put it aside; what goes wrong is this rank's, not the writer's."""
        entry = self._handlers.get(message.topic)
        if entry is None:
            self._held.append(message)
            return
        try:
            if message.src not in entry.src:
                raise MismatchError(
                    f"rank {self._rank}: nobody answers messages on topic {message.topic} from rank {message.src}"
                )
            with torch.no_grad():
                done = entry.handler(message._replace(content=self._checked(message, entry.like).content))
        except Exception as error:
            self._fail(error)
            return
        if done:
            self._took(message)
        else:
            self._held.append(message)

    def _took(self, message: Message) -> None:
        edge = self._edges[message.src]
        edge.taken += 1
        # Each word of it wakes the writer: of wide rooms only every quarter is told.
        if edge.taken - edge.told >= max(1, self.capacity // 4):
            edge.told = edge.taken
            self._make_room(message.src, edge.taken)

    def _room_was_made(self, dst: int, taken: int) -> None:
        with self.changed:
            edge = self._edges[dst]
            edge.room_made = max(edge.room_made, min(taken, edge.posted))
            self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Keep the first thing that went wrong, for whoever calls next."""
        with self.changed:
            self._fault = self._fault or error
            self.changed.notify_all()

    def _checked(self, message: Message, like: Tensor) -> Message:
        x = message.content
        if x.numel() != like.numel() or x.dtype != like.dtype:
            raise MismatchError(
                f"rank {message.src} sent {describe(x)} at its step {message.step}, "
                f"rank {self._rank} expects {describe(like)}"
            )
        return message if x.device == like.device else message._replace(content=x.to(like.device))

    def _late(self, waiting_for: str) -> CommTimeoutError:
        seconds, step = self._comm.timeout, self._comm.step
        return CommTimeoutError(f"rank {self._rank} waited {seconds:g} s for {waiting_for} at step {step}")

    def _cannot_send(self, dst: int, x: Tensor) -> ConfigError:
        if dst == self._rank or not 0 <= dst < self._size:
            return ConfigError(
                f"a message from rank {self._rank} to rank {dst}: write to another of 0..{self._size - 1}"
            )
        return ConfigError(f"a message of {nbytes_of(x)} bytes: this mailbox was opened for {self._largest} at most")

    def _count(self, nbytes: int) -> None:
        """Meter a message; those that were answered in other threads wait for this rank's own."""
        self._untold.append(nbytes)
        if threading.get_ident() == self._home:
            self._tell()

    def _tell(self) -> None:
        for nbytes in self._untold:
            self._comm.meter.sent("send_recv", nbytes)
        self._untold.clear()
