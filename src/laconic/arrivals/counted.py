"""Arrivals where nobody else is: what one rank would send, on a wire that carries nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.arrivals.adding import HEADER_BYTES, Cut
from laconic.arrivals.notes import Kind, Note, length
from laconic.arrivals.rules import Rule
from laconic.replica import Replica


class CountedParty:
    """A rank that always comes in time, with as few others as must.

    Args:
        r: the replica, on a `CountingComm`.
        rule: how long to wait for whom.
        keeper: the rank that decides.
    """

    def __init__(self, r: Replica, rule: Rule, *, keeper: int) -> None:
        self._comm, self._cut, self._keeper = r.comm, Cut(r.x.numel(), rule.least, r.x.dtype), keeper
        first = [(r.comm.rank + turn) % r.comm.size for turn in range(rule.least)]
        self._members = tuple(sorted(first))
        self.outcome: Note | None = None

    def come(self, gradient: Tensor) -> Note:
        """Count the letters of a step; the gradient stays as it is."""
        others = [rank for rank in self._members if rank != self._comm.rank]
        piece = torch.empty(HEADER_BYTES + self._cut.nbytes, dtype=torch.uint8, device="meta")
        note = torch.empty(length(self._comm.size), dtype=torch.int64, device="meta")
        if self._keeper == self._comm.rank:
            for _ in range(2):  # it hears of each member twice, and answers twice
                self._comm.exchange(note, others, others).wait()
        else:
            for _ in range(2):
                self._comm.exchange(note, [self._keeper], [self._keeper]).wait()
        for _ in range(2):  # everyone's parts, and the means of them
            self._comm.exchange(piece, others, others).wait()
        self.outcome = Note(Kind.CLOSED, self._comm.step, 1, members=self._members)
        return self.outcome

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
