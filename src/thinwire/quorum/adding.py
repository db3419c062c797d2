"""Adding up a vector among the members of a step: each member adds up one part for all.

Parts are added in the order of ranks, so that the sum is the same to the bit wherever it is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

_HEADER = 4
HEADER_BYTES = 8 * _HEADER


class Piece(NamedTuple):
    """A part of a vector, under way.

    Attributes:
        step: of training.
        attempt: at that step.
        place: which part it is.
        whole: whether it is the mean already; of a state, how many bytes that has in all.
        content: its bytes.
    """

    step: int
    attempt: int
    place: int
    whole: int
    content: Tensor

    def message(self, nbytes: int) -> Tensor:
        """Header, content and nothing more, as a vector of `HEADER_BYTES + nbytes` bytes on the CPU."""
        message = torch.zeros(HEADER_BYTES + nbytes, dtype=torch.uint8)
        message[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(self[:_HEADER]))
        data = self.content.detach().contiguous().view(-1).view(torch.uint8)
        message[HEADER_BYTES : HEADER_BYTES + data.numel()].copy_(data)
        return message


def piece_of(message: Tensor) -> Piece:
    """What a message holds; the content shares its memory."""
    # Frames lie where the wire put them, which need not be where 8-byte numbers may lie.
    step, attempt, place, whole = message[:HEADER_BYTES].clone().view(torch.int64).tolist()
    return Piece(step, attempt, place, whole, message[HEADER_BYTES:])


class Part(NamedTuple):
    """A part of a vector for one member.

    Attributes:
        dst: the member.
        place: which part.
        whole: 1 of a mean, 0 of one rank's.
        content: its elements, on the CPU.
    """

    dst: int
    place: int
    whole: int
    content: Tensor


class Cut(NamedTuple):
    """How a vector is cut into parts of one length, of which the last may be shorter or empty.

    Attributes:
        numel: elements of the vector.
        parts: how many.
        dtype: of the elements.
    """

    numel: int
    parts: int
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Elements of a part."""
        return -(-self.numel // self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of a part."""
        return self.length * self.dtype.itemsize

    def slices(self) -> list[slice]:
        """Where the parts lie."""
        ends = [min(self.numel, place * self.length) for place in range(self.parts + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def read(self, content: Tensor, place: int) -> Tensor:
        """The elements of a part, from the bytes of a message."""
        size = self.slices()[place].stop - self.slices()[place].start
        return content[: size * self.dtype.itemsize].clone().view(self.dtype)


@dataclass
class Adding:
    """One attempt to add up a vector among members.

    The i-th member adds up the i-th part; members beyond the number of parts add up none.

    Args:
        cut: of the vector.
        rank: of this member.
        members: in the order of ranks, at least as many as parts.
        brought: of the own part, what each member brought.
        means: of each part, the mean.
        sent: whether the own gradient is on its way.
        told: whether the keeper knows that all is here.
    """

    cut: Cut
    rank: int
    members: tuple[int, ...]
    brought: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    means: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    sent: bool = False
    told: bool = False

    @property
    def own(self) -> int:
        """The part that this member adds up; beyond the last where it adds up none."""
        return self.members.index(self.rank)

    @property
    def is_ready(self) -> bool:
        """Whether the own part can be added up now."""
        return self.own < self.cut.parts and self.own not in self.means and len(self.brought) == len(self.members)

    @property
    def is_done(self) -> bool:
        """Whether all parts of the mean are here."""
        return len(self.means) == self.cut.parts

    @property
    def wakes(self) -> bool:
        """Whether this member has something to do."""
        return not self.sent or self.is_ready or (self.is_done and not self.told)

    def take(self, src: int, piece: Piece) -> None:
        """A part has come from a member."""
        if piece.whole:
            self.means[piece.place] = self.cut.read(piece.content, piece.place)
        else:
            self.brought[src] = self.cut.read(piece.content, piece.place)

    def messages(self, vector: Tensor) -> list[Part]:
        """What is to be sent now; adds up the own part once it can be."""
        sent = [] if self.sent else self._shared_out(vector)
        self.sent = True
        return [*sent, *self._added()] if self.is_ready else sent

    def put(self, vector: Tensor) -> None:
        """Write the mean over a vector."""
        for place, where in enumerate(self.cut.slices()):
            vector[where].copy_(self.means[place])

    def _shared_out(self, vector: Tensor) -> list[Part]:
        """Every part, to the member that adds it up; the next one's first, so that not all write to the same."""
        slices, own = self.cut.slices(), self.own
        if own < self.cut.parts:
            self.brought[self.rank] = vector[slices[own]].cpu()
        places = [(own + turn) % len(self.members) for turn in range(1, len(self.members))]
        return [Part(self.members[p], p, 0, vector[slices[p]].cpu()) for p in places if p < self.cut.parts]

    def _added(self) -> list[Part]:
        """The mean of the own part, to everyone else."""
        mean = reduce(torch.add, [self.brought[rank] for rank in self.members]) / len(self.members)
        self.means[self.own] = mean
        return [Part(rank, self.own, 1, mean) for rank in self.members if rank != self.rank]
