# SPDX-License-Identifier: Apache-2.0
"""Who coordinates, who is lost, and what a new coordinator must know before it may decide anything.

Ranks coordinate in one cyclic order, from the configured one on; a rank's place in it never moves back. When the
coordinator is lost, the next rank that is not becomes the coordinator. It asks all living ranks for a *promise*: to
follow none of its predecessors any more, and which step's result they hold. Once all of them have promised, nobody
alive can use a mean that the new coordinator does not know of, and it decides the first step that none of them holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from thinwire.quorum.messages import ControlMessage

ATTEMPTS = 1 << 20
"""More than any coordinator makes at one step: each has attempt numbers of its own, so that chunks are never mixed."""


def splits(running: int, unknown: int, *, settled: bool) -> bool:
    """Whether ranks that cannot be reached may train on by themselves, if a network has split.

    A new coordinator needs more than half of all ranks that have not ended, so that nobody else can be one. One that
    decides already may go on with half of them.

    Args:
        running: ranks that are not known to have ended.
        unknown: those of them that cannot be reached.
        settled: whether the coordinator decides already.
    """
    return 2 * unknown > running if settled else 2 * unknown >= running


@dataclass
class Succession:
    """One rank's view of the coordinators.

    Attributes:
        rank: this one.
        size: ranks in all.
        coordinator_rank: the rank that decides, as far as is known here.
        first: the rank that decided first.
        gone: ranks that are lost; they never come back.
        ended: those of them that are known to decide nothing any more, since their processes have ended.
        settled: whether that coordinator decides; False while it collects promises.
        promises: what each rank holds; only on a rank that is becoming the coordinator.
        ready: READY messages that came before it may decide.
    """

    rank: int
    size: int
    coordinator_rank: int
    first: int = field(init=False)
    gone: set[int] = field(default_factory=set[int])
    ended: set[int] = field(default_factory=set[int])
    settled: bool = True
    promises: dict[int, ControlMessage] = field(default_factory=dict[int, ControlMessage])
    ready: dict[int, ControlMessage] = field(default_factory=dict[int, ControlMessage])

    def __post_init__(self) -> None:
        """The configured coordinator is the first."""
        self.first = self.coordinator_rank

    @property
    def living(self) -> list[int]:
        """The ranks that are not lost, in order."""
        return [rank for rank in range(self.size) if rank not in self.gone]

    @property
    def first_attempt(self) -> int:
        """One less than the first attempt number of the current coordinator."""
        return self.place_of(self.coordinator_rank) * ATTEMPTS

    @property
    def is_taking_over(self) -> bool:
        """Whether this rank is becoming the coordinator."""
        return self.coordinator_rank == self.rank and not self.settled

    def place_of(self, rank: int) -> int:
        """A rank's place in the order of coordinators, from 0."""
        return (rank - self.first) % self.size

    def is_later(self, rank: int) -> bool:
        """Whether a rank coordinates after the current coordinator."""
        return self.place_of(rank) > self.place_of(self.coordinator_rank)

    def lose(self, gone: Collection[int], ended: Collection[int]) -> set[int]:
        """Note that ranks are lost; returns those that were not known to be."""
        new = set(gone) - self.gone
        self.gone |= new
        self.ended |= set(ended) & self.gone
        return new

    def successor(self) -> int | None:
        """The next coordinator that is not lost; None after the last place in the order."""
        later = [rank for rank in self.living if self.is_later(rank)]
        return min(later, key=self.place_of, default=None)

    def adopt(self, rank: int) -> None:
        """Follow another coordinator, which does not decide yet."""
        self.coordinator_rank, self.settled = rank, False
        self.promises.clear()
        self.ready.clear()

    def silent(self) -> list[int]:
        """The ranks whose promise a new coordinator still needs."""
        return [rank for rank in self.living if rank not in self.promises]

    def splits(self) -> bool:
        """Whether those that are lost may train on without this rank, as far as it knows."""
        return splits(self.size - len(self.ended), len(self.gone - self.ended), settled=self.settled)

    def in_words(self) -> str:
        """Why there is no coordinator, for an error."""
        words = f"{self.coordinator_rank} could not take over from the coordinator; lost ranks: {sorted(self.gone)}"
        return f"rank {words}" + (f"; ranks that have not answered it: {self.silent()}" if self.is_taking_over else "")

    def may_begin(self) -> bool:
        """Whether this rank, which is becoming the coordinator, may decide."""
        return self.is_taking_over and not self.silent() and not self.splits()

    def held(self) -> ControlMessage:
        """The promise of a living rank that holds most steps, with the attempt of the last one where that is known."""
        return max((self.promises[rank] for rank in self.living), key=lambda each: (each.step, each.attempt))
