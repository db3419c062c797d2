"""A step from one rank's side: from its coming until it has left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from torch import Tensor

from thinwire.quorum.adding import Adding, Piece
from thinwire.quorum.control_messages import Note


@dataclass
class Round:
    """A step that this rank has come to, and has not left.

    Attributes:
        step: of training.
        gradient: that it brings, on the CPU.
        began: when it came, in seconds.
        told: when the keeper was last told so.
        went: when the latest attempt began here.
        attempt: the latest that it is a member of; 0 before the first.
        adding: of that attempt; None where that is an all-reduce.
        early: pieces for attempts that were not yet announced here, and who sent them.
        outcome: how the step was closed; None as long as it is open.
        summed: the number of the latest all-reduce for this step, and the mean that it came to.
        lent: whether another thread reads the gradient, which must stay as it is.
        holds: whether the gradient has become the mean of members.
        refused: two ranks whose optimizers are set differently.
    """

    step: int
    gradient: Tensor
    began: float
    told: float
    went: float = 0.0
    attempt: int = 0
    adding: Adding | None = None
    early: list[tuple[int, Piece]] = field(default_factory=list[tuple[int, Piece]])
    outcome: Note | None = None
    summed: tuple[int, Tensor] | None = None
    lent: bool = False
    holds: bool = False
    refused: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether the step is closed, and the gradient this rank's own again."""
        return self.outcome is not None and not self.lent

    def lend(self, step: int) -> bool:
        """Keep the gradient as it is for a while, if this is that step and it is open."""
        self.lent = self.step == step and self.outcome is None
        return self.lent

    def go(self, attempt: int, adding: Adding | None) -> None:
        """Begin an attempt."""
        self.attempt, self.adding, self.went = attempt, adding, time.perf_counter()
        for src, piece in self.early:
            if piece.attempt == attempt and adding is not None:
                adding.take(src, piece)
        self.early = [(src, piece) for src, piece in self.early if piece.attempt > attempt]

    def take(self, src: int, piece: Piece) -> None:
        """A piece has come, for this attempt or a later one."""
        if piece.attempt > self.attempt:
            self.early.append((src, piece))
        elif piece.attempt == self.attempt and self.adding is not None:
            self.adding.take(src, piece)
