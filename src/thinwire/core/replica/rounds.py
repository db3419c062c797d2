# SPDX-License-Identifier: Apache-2.0
"""Barriers and rounds for workers that send messages at their own pace.

No rank makes a collective call here: a worker reports its progress, and answers messages while it waits.
All counters are tensors in a replica's state, so that a checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from thinwire.core.comm.mailbox.base import Mailbox, Message
from thinwire.core.replica.point_to_point import number, on_message
from thinwire.core.replica.replica import Replica


@dataclass(frozen=True)
class Barrier:
    """The progress of each rank by its last message; ranks wait until others have caught up.

    The strategy chooses what is counted: steps, or meetings of the ranks. Between the barrier and its next step a rank
    must not change parameters that it may be evaluating or saving, so it defers messages of ranks that `reached` it.

    Attributes:
        name: the name of the counters in the replica's state, one for each rank; the strategy may use its own counter.
        topic: the topic of the messages.
        until: what the others must do, for the error.

    Example:
        >>> import torch
        >>> from thinwire import Comm, Replica, run_threads
        >>> from thinwire.core.replica.point_to_point import open_mailbox, others
        >>> def work(comm: Comm) -> list[int]:
        ...     barrier = Barrier("met", topic=1, until="to be here")
        ...     r = Replica(torch.zeros(1), torch.zeros(0), comm, lr=lambda: 0.1)
        ...     box = open_mailbox(r, torch.zeros(1))
        ...     barrier.open(r, others(r))
        ...     barrier.reach(r, 1, dst=others(r))
        ...     barrier.wait(r, 1, src=others(r))
        ...     return r.state["met"].tolist()
        >>> run_threads(2, work)
        [[0, 1], [1, 0]]
    """

    name: str
    topic: int
    until: str

    def open(self, r: Replica, src: Sequence[int]) -> None:
        """Start to count from 0, in an open mailbox; the ranks in `src` will send messages."""
        r.state[self.name] = torch.zeros(r.comm.size, dtype=torch.int64, device="cpu")

        def record(r: Replica, _: Mailbox, message: Message) -> bool:
            r.state[self.name][message.src] = message.content[0]
            return True

        on_message(r, self.topic, record, like=number(0), src=src)

    def reach(self, r: Replica, count: int, *, dst: Sequence[int]) -> None:
        """Record this rank's progress and report it to others."""
        for rank in dst:
            r.comm.mailbox(r).send(rank, number(count), topic=self.topic)

    def reached(self, r: Replica, rank: int, count: int) -> bool:
        """Return True if a rank has reached the count."""
        return bool(r.state[self.name][rank] >= count)

    def wait(self, r: Replica, count: int, *, src: Sequence[int]) -> None:
        """Wait until the ranks in `src` have reached the count.

        Raises:
            CommTimeoutError: some ranks did not reach it within the timeout; the error names them.
            PeerLostError: one of them is gone.
        """
        box = r.comm.mailbox(r)
        with box.changed:
            box.wait_until(
                lambda: [rank for rank in src if not self.reached(r, rank, count)], f"{{ranks}} {self.until}"
            )


class GoOn(IntEnum):
    """The reason why a rank at a barrier continues."""

    ROUND_OVER = 1  # others train and have used up the round's budget
    ALL_HERE = 2  # all ranks are at the barrier


Answers = list[tuple[int, GoOn]]
"""Ranks that continue, each with the reason."""
_TRAINING, _PAUSED = -1, -2  # instead of the round in which a rank waits


@dataclass(frozen=True)
class RoundBudget:
    """A state machine for rounds with a total number of steps, however uneven the ranks.

    Rank 0 counts. A rank may wait at a barrier while others train. It continues when the round is over, since the end
    of a round needs all ranks, or when all ranks are at the barrier. In the latter case rank 0 is paused until its own
    next step: it may be about to load a checkpoint, so nothing is counted, and messages of others must be deferred.

    Attributes:
        budget: the steps of a round.
        spent: the steps so far, shape (2,), by the parity of the round: a fast rank may end a step of the next round
            before rank 0 is in it.
        waiting: for each rank, the round in which it waits at the barrier; negative while it trains.

    Example:
        >>> rounds = RoundBudget.of(2, ranks=2)
        >>> rounds.resume()
        >>> rounds.arrive(1, 0), rounds.add_step(0), rounds.add_step(0)
        ([], [], [(1, <GoOn.ROUND_OVER: 1>)])
        >>> rounds.arrive(1, 1), rounds.arrive(0, 1), rounds.paused
        ([], [(0, <GoOn.ALL_HERE: 2>), (1, <GoOn.ALL_HERE: 2>)], True)
    """

    budget: int
    spent: Tensor
    waiting: Tensor

    @classmethod
    def of(cls, budget: int, ranks: int) -> RoundBudget:
        """Make the state before the first step of rank 0."""
        waiting = torch.full((ranks,), _TRAINING, dtype=torch.int64, device="cpu")
        waiting[0] = _PAUSED
        return cls(budget, torch.zeros(2, dtype=torch.int64, device="cpu"), waiting)

    @property
    def paused(self) -> bool:
        """True if rank 0 has met all others at the barrier, and has taken no step since."""
        return bool(self.waiting[0] == _PAUSED)

    def resume(self) -> None:
        """Record a step of rank 0."""
        self.waiting[0] = _TRAINING

    def steps(self, round_: int) -> int:
        """Return the steps of a round so far."""
        return int(self.spent[round_ % 2])

    def add_step(self, round_: int) -> Answers:
        """Count one step of a round."""
        self.spent[round_ % 2] += 1
        return self._answers(round_)

    def begin_next(self, round_: int) -> None:
        """Count the next round from 0. No rank may be in it before all have ended this one."""
        self.spent[(round_ + 1) % 2] = 0

    def arrive(self, rank: int, round_: int) -> Answers:
        """Record a rank's arrival at the barrier in a round."""
        self.waiting[rank] = round_
        return self._answers(round_)

    def missing(self) -> list[int]:
        """Return the ranks for which rank 0 waits at the barrier; none after it continues."""
        if self.waiting[0] < 0:
            return []
        return [rank for rank, round_ in enumerate(self.waiting.tolist()) if round_ < 0]

    def _answers(self, round_: int) -> Answers:
        """Release the ranks at the barrier if the round is over, or if no rank trains any more."""
        at_barrier = [rank for rank, waiting in enumerate(self.waiting.tolist()) if waiting >= 0]
        if self.steps(round_) >= self.budget:
            reason = GoOn.ROUND_OVER
        elif len(at_barrier) == len(self.waiting):
            reason = GoOn.ALL_HERE
        else:
            return []
        for rank in at_barrier:
            self.waiting[rank] = _TRAINING
        if reason is GoOn.ALL_HERE:
            self.waiting[0] = _PAUSED
        return [(rank, reason) for rank in at_barrier]
