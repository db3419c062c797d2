"""What a rank and the keeper of arrivals tell each other, in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

_FIELDS = 6


class Kind(IntEnum):
    """What a note says."""

    HERE = 0  # to the keeper: my gradient of this step is ready
    HELD = 1  # to the keeper: I hold the mean of this attempt, or the all-reduce has ended here
    GO = 2  # to members, or to everyone: add up the gradients of members
    CLOSED = 3  # to all who are here: the step is decided, by these members
    LATE = 4  # to one: its step was decided long ago, last by these members
    REFUSED = 5  # to all who are here: two ranks have different optimizers
    WANTED = 6  # to a member: send me the state of this step or a later one
    STILL = 7  # to everyone: I have ended a step and do nothing more until all have


class Note(NamedTuple):
    """One note.

    Attributes:
        kind: what it says.
        step: of training, that it is about.
        attempt: which attempt at that step; of LATE, the step it answers.
        digest: of the optimizer's settings.
        microseconds: that the gradient took.
        sum: the number of the all-reduce that adds up, from 1; of LATE, that has added up the latest step. 0 is none:
            members add up by messages.
        members: ranks.
    """

    kind: Kind
    step: int
    attempt: int = 0
    digest: int = 0
    microseconds: int = 0
    sum: int = 0
    members: tuple[int, ...] = ()

    def vector(self, size: int) -> Tensor:
        """The note as `length(size)` numbers."""
        flags = [0] * size
        for rank in self.members:
            flags[rank] = 1
        return torch.tensor([*self[:_FIELDS], *flags])


def note_of(numbers: Sequence[int]) -> Note:
    """The note that was made into these numbers."""
    kind, step, attempt, digest, microseconds, number = numbers[:_FIELDS]
    members = tuple(rank for rank, flag in enumerate(numbers[_FIELDS:]) if flag)
    return Note(Kind(kind), step, attempt, digest, microseconds, number, members)


def length(size: int) -> int:
    """Numbers in a note among so many ranks."""
    return _FIELDS + size
