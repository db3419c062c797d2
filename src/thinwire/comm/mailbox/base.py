"""Letters: what one rank says to another without a common schedule.

Each pair of ranks has an edge in either direction. Letters of an edge are numbered and arrive in that order, each once.
An edge holds at most `capacity` letters that were posted and not yet taken, so that memory is bounded by design and not
by luck: whoever posts one more waits for room. Every wait has the comm's deadline.
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
from thinwire.errors import CommError, ConfigError, DeadlineError, MismatchError

_LEAST_BYTES = 64  # always allowed, for letters that carry a number
_LOOK_SECONDS = 0.2  # how often a wait asks whether the peer is still there


class Letter(NamedTuple):
    """A vector from one rank to another.

    Attributes:
        frm: the rank that posted it.
        step: that rank's step then.
        topic: what it is about, as the strategy numbers it; 0 is what `expect` expects.
        content: the vector.
    """

    frm: int
    step: int
    topic: int
    content: Tensor


Handler = Callable[[Letter], bool]


class Endpoint(Protocol):
    """What a mailbox needs of the `Comm` that opens it; `Comm` itself imports this module."""

    rank: int
    size: int
    step: int
    deadline_seconds: float
    meter: Meter


@dataclass
class Edge:
    """What one rank knows of its letters with one other.

    Attributes:
        posted: letters to it.
        room_made: how many of those it has taken.
        heard: letters from it that have come in order.
        early: letters from it that came before others that they follow, by number.
        taken: letters from it that were used here.
        told: how many of those it knows of.
        promised: letters of topic 0 that somebody here expects or has had.
        filed: how many of topic 0 have come.
        inbox: those that nobody has taken yet, by number.
    """

    posted: int = 0
    room_made: int = 0
    heard: int = 0
    early: dict[int, Letter] = field(default_factory=dict[int, Letter])
    taken: int = 0
    told: int = 0
    promised: int = 0
    filed: int = 0
    inbox: dict[int, Letter] = field(default_factory=dict[int, Letter])


class Desk(NamedTuple):
    """Who answers the letters of one topic, and which letters those are."""

    handler: Handler
    like: Tensor
    frm: tuple[int, ...]


class Mailbox(ABC):
    """One rank's letters with all others, for one owner.

    Attributes:
        changed: the one lock of everything here, and told of every change. A strategy whose vectors are used in
            answers holds it while it touches them.
        duplicates: letters that came twice and were dropped the second time.
        capacity: letters that may be under way on one edge.
    """

    def __init__(self, comm: Endpoint, like: Tensor, capacity: int, changed: threading.Condition) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity={capacity}: must be at least 1 letter; 4 is usual")
        self.changed = changed
        self.capacity = capacity
        self.duplicates = 0
        self._rank, self._size = comm.rank, comm.size
        self._comm = comm
        self._largest = max(_LEAST_BYTES, nbytes_of(like))
        self._edges = {rank: Edge() for rank in range(comm.size) if rank != comm.rank}
        self._desks: dict[int, Desk] = {}
        self._held: list[Letter] = []
        self._closed = False
        self._fault: Exception | None = None
        self._home = threading.get_ident()
        self._untold: list[int] = []

    # -- for strategies ------------------------------------------------------------------------------------------

    def post(self, to: int, x: Tensor, *, topic: int = 0) -> None:
        """Send a copy of `x` to one rank; waits only while `capacity` letters to it have not been taken.

        Args:
            to: the rank.
            x: a vector; may change as soon as the call returns.
            topic: what it is about; 0 is what the other rank expects, others are answered.

        Raises:
            ConfigError: to itself, to nobody, or longer than the mailbox was opened for.
            DeadlineError: no letter of an earlier time was taken.
            PeerLostError: the other rank is known to be gone.
        """
        if to not in self._edges or nbytes_of(x) > self._largest:
            raise self._cannot_post(to, x)
        with self.changed:
            edge, start = self._edges[to], time.perf_counter()
            full = edge.posted - edge.room_made >= self.capacity
            self._complain([to])
            self.until(
                lambda: [to] if edge.posted - edge.room_made >= self.capacity else [],
                f"room for a letter to rank {to}",
            )
            number, edge.posted = edge.posted, edge.posted + 1
            self._carry(to, Letter(self._rank, self._comm.step, topic, x), number)
            self._count(nbytes_of(x))
        if full:
            self._comm.meter.waited("room", start, start, time.perf_counter(), self._comm.step)

    def expect(self, frm: int, like: Tensor) -> Work[Letter]:
        """The next letter of topic 0 from one rank, when it comes; `ready` says whether it has, or never will.

        Letters of one rank come in the order in which they were posted, and belong to these calls in theirs.

        Args:
            frm: the rank.
            like: a vector of the size, dtype and device that the content will have.

        Returns:
            Work that raises, when it is asked or waited for, DeadlineError, PeerLostError, or MismatchError where
            another kind of vector came.
        """
        edge, step, launched = self._edges[frm], self._comm.step, time.perf_counter()
        number, edge.promised = edge.promised, edge.promised + 1

        def take() -> Letter:
            start = time.perf_counter()
            with self.changed:
                self.until(lambda: [] if number in edge.inbox else [frm], f"a letter from rank {frm}")
                letter = edge.inbox.pop(number)
                self._took(letter)
            self._comm.meter.waited("letter", launched, start, time.perf_counter(), step)
            return self._checked(letter, like)

        def is_here() -> bool:
            with self.changed:
                if self._has_come(frm, number, step):
                    return True
                if number not in edge.inbox:
                    self._complain([frm])
            if time.perf_counter() - launched > self._comm.deadline_seconds:
                raise self._late(f"a letter from rank {frm}")
            return False

        return Work(take, is_here)

    def answer(self, topic: int, handler: Handler, *, like: Tensor, frm: Sequence[int]) -> None:
        """Hand every letter of a topic to `handler` as soon as it comes, in whatever thread it comes in.

        Args:
            topic: not 0.
            handler: called with the letter, under `changed`; must not wait. False puts the letter aside until
                `retry`.
            like: a vector of the size, dtype and device of the content.
            frm: who may write on this topic.
        """
        with self.changed:
            self._desks[topic] = Desk(handler, like, tuple(frm))
            self._offer()

    def retry(self) -> None:
        """Offer letters that were put aside once more, and raise what has gone wrong with others meanwhile."""
        with self.changed:
            self._offer()
            self._tell()
            self._complain(())

    def _offer(self) -> None:
        held, self._held = self._held, []
        for letter in held:
            self._handle(letter)

    def until(self, missing: Callable[[], Sequence[int]], waiting_for: str) -> None:
        """Wait until no rank is missing, as letters will have it; the caller holds `changed`.

        Args:
            missing: the ranks from which something has yet to come; asked whenever anything has.
            waiting_for: what that is, in words, for the error.

        Raises:
            DeadlineError: it did not come in time.
            PeerLostError: one of those ranks is gone.
        """
        end = time.monotonic() + self._comm.deadline_seconds
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
    def _carry(self, to: int, letter: Letter, number: int) -> None:
        """Send a copy of a letter; called under `changed`, never to wait."""

    @abstractmethod
    def _make_room(self, frm: int, taken: int) -> None:
        """Tell a rank how many of its letters have been taken."""

    def _complain(self, frm: Sequence[int]) -> None:
        """Raise what stands in the way of hearing from these ranks."""
        if self._fault is not None:
            raise self._fault
        if self._closed:
            raise CommError(f"rank {self._rank}: this mailbox is closed; attach the model again")

    def _has_come(self, frm: int, number: int, step: int) -> bool:
        return number in self._edges[frm].inbox

    def _deliver(self, letter: Letter, number: int) -> None:
        """A letter has come, in whatever order and however often."""
        with self.changed:
            edge = self._edges[letter.frm]
            if number < edge.heard or number in edge.early:
                self.duplicates += 1
                return
            if number >= edge.heard + self.capacity:
                self._fail(
                    CommError(f"rank {self._rank}: letter {edge.heard} of rank {letter.frm} was lost on the way")
                )
                return
            edge.early[number] = letter
            while edge.heard in edge.early:
                following = edge.early.pop(edge.heard)
                edge.heard += 1
                self._file(following)
            self.changed.notify_all()

    def _file(self, letter: Letter) -> None:
        if letter.topic:
            self._handle(letter)
            return
        edge = self._edges[letter.frm]
        edge.inbox[edge.filed] = letter
        edge.filed += 1

    def _handle(self, letter: Letter) -> None:
        """Answer a letter, or put it aside; what goes wrong is this rank's, not the writer's."""
        desk = self._desks.get(letter.topic)
        if desk is None:
            self._held.append(letter)
            return
        try:
            if letter.frm not in desk.frm:
                raise MismatchError(
                    f"rank {self._rank}: nobody answers letters on topic {letter.topic} from rank {letter.frm}"
                )
            with torch.no_grad():
                done = desk.handler(letter._replace(content=self._checked(letter, desk.like).content))
        except Exception as error:
            self._fail(error)
            return
        if done:
            self._took(letter)
        else:
            self._held.append(letter)

    def _took(self, letter: Letter) -> None:
        edge = self._edges[letter.frm]
        edge.taken += 1
        # Each word of it wakes the writer: of wide rooms only every quarter is told.
        if edge.taken - edge.told >= max(1, self.capacity // 4):
            edge.told = edge.taken
            self._make_room(letter.frm, edge.taken)

    def _room_was_made(self, to: int, taken: int) -> None:
        with self.changed:
            edge = self._edges[to]
            edge.room_made = max(edge.room_made, min(taken, edge.posted))
            self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        """Keep the first thing that went wrong, for whoever calls next."""
        with self.changed:
            self._fault = self._fault or error
            self.changed.notify_all()

    def _checked(self, letter: Letter, like: Tensor) -> Letter:
        x = letter.content
        if x.numel() != like.numel() or x.dtype != like.dtype:
            raise MismatchError(
                f"rank {letter.frm} sent {describe(x)} at its step {letter.step}, "
                f"rank {self._rank} expects {describe(like)}"
            )
        return letter if x.device == like.device else letter._replace(content=x.to(like.device))

    def _late(self, waiting_for: str) -> DeadlineError:
        seconds, step = self._comm.deadline_seconds, self._comm.step
        return DeadlineError(f"rank {self._rank} waited {seconds:g} s for {waiting_for} at step {step}")

    def _cannot_post(self, to: int, x: Tensor) -> ConfigError:
        if to == self._rank or not 0 <= to < self._size:
            return ConfigError(f"a letter from rank {self._rank} to rank {to}: write to another of 0..{self._size - 1}")
        return ConfigError(f"a letter of {nbytes_of(x)} bytes: this mailbox was opened for {self._largest} at most")

    def _count(self, nbytes: int) -> None:
        """Meter a letter; those that were answered in other threads wait for this rank's own."""
        self._untold.append(nbytes)
        if threading.get_ident() == self._home:
            self._tell()

    def _tell(self) -> None:
        for nbytes in self._untold:
            self._comm.meter.sent("exchange", nbytes)
        self._untold.clear()
