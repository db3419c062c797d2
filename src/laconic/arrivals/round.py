"""A step from one rank's side: from its coming until it has left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from laconic.arrivals.adding import Adding, Piece
from laconic.arrivals.notes import Note


@dataclass
class Round:
    """A step that this rank has come to, and has not left.

    Attributes:
        step: of training.
        began: when it came, in seconds.
        told: when the keeper was last told so.
        went: when the latest attempt began here.
        attempt: the latest that it is a member of; 0 before the first.
        adding: of that attempt.
        early: pieces for attempts that were not yet announced here, and who sent them.
        outcome: how the step was closed; None as long as it is open.
        refused: two ranks whose optimizers are set differently.
    """

    step: int
    began: float
    told: float
    went: float = 0.0
    attempt: int = 0
    adding: Adding | None = None
    early: list[tuple[int, Piece]] = field(default_factory=list[tuple[int, Piece]])
    outcome: Note | None = None
    refused: tuple[int, ...] = ()

    def go(self, attempt: int, adding: Adding) -> None:
        """Begin an attempt."""
        self.attempt, self.adding, self.went = attempt, adding, time.perf_counter()
        for frm, piece in self.early:
            if piece.attempt == attempt:
                adding.take(frm, piece)
        self.early = [(frm, piece) for frm, piece in self.early if piece.attempt > attempt]

    def take(self, frm: int, piece: Piece) -> None:
        """A piece has come, for this attempt or a later one."""
        if piece.attempt > self.attempt:
            self.early.append((frm, piece))
        elif piece.attempt == self.attempt and self.adding is not None:
            self.adding.take(frm, piece)
