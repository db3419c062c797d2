"""Arrivals where nobody else is: what one rank would send, on a wire that carries nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.quorum.adding import HEADER_BYTES, Cut
from thinwire.quorum.control_messages import Kind, Note, length
from thinwire.quorum.reduction_selector import Plane
from thinwire.quorum.rules import Rule
from thinwire.replica.replica import Replica


class CountedParty:
    """A rank that always comes in time, with as few others as must.

    Args:
        r: the replica, on a `CountingComm`.
        rule: how long to wait for whom.
        plane: by which way members add up; of "auto", which measures, messages are counted.
        keeper: the rank that decides.
    """

    def __init__(self, r: Replica, rule: Rule, plane: Plane, *, keeper: int) -> None:
        self._sums = plane == "zeros"
        self._comm, self._cut, self._keeper = r.comm, Cut(r.x.numel(), rule.least, r.x.dtype), keeper
        first = [(r.comm.rank + turn) % r.comm.size for turn in range(rule.least)]
        self._members = tuple(sorted(first))
        self.outcome: Note | None = None

    def come(self, gradient: Tensor) -> Note:
        """Count the messages of a step; the gradient stays as it is."""
        others = [rank for rank in self._members if rank != self._comm.rank]
        note = torch.empty(length(self._comm.size), dtype=torch.int64, device="meta")
        everyone = [rank for rank in range(self._comm.size) if rank != self._comm.rank]
        if self._keeper == self._comm.rank:
            # It hears of each member twice, and answers twice; an all-reduce is announced to all, and ends for all.
            self._comm.send_recv(note, everyone if self._sums else others, others).wait()
            self._comm.send_recv(note, others, everyone if self._sums else others).wait()
        else:
            for _ in range(2):
                self._comm.send_recv(note, [self._keeper], [self._keeper]).wait()
        if self._sums:
            self._comm.all_reduce_(torch.empty(self._cut.numel, dtype=self._cut.dtype, device="meta")).wait()
        else:
            self._exchange(others)
        self.outcome = Note(Kind.CLOSED, self._comm.step, 1, sum=int(self._sums), members=self._members)
        return self.outcome

    def _exchange(self, others: Sequence[int]) -> None:
        """Everyone's parts, and the means of them."""
        piece = torch.empty(HEADER_BYTES + self._cut.nbytes, dtype=torch.uint8, device="meta")
        for _ in range(2):
            self._comm.send_recv(piece, others, others).wait()

    @property
    def holds(self) -> bool:
        """Always."""
        return True

    def is_member(self, outcome: Note) -> bool:
        """Always."""
        return outcome.kind is Kind.CLOSED

    def catch_up(self, outcome: Note) -> None:
        """Never needed."""

    def rest(self) -> None:
        """Nobody asks."""
        self.outcome = None

    def stand_still(self) -> None:
        """Nobody else moves."""
