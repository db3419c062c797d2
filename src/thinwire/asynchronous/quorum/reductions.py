# SPDX-License-Identifier: Apache-2.0
"""A state machine that averages members' gradients by messages, without connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.asynchronous.quorum.messages import GradientChunk


class Partition(NamedTuple):
    """The partition of a vector into parts of one length; the last ones may be shorter or empty.

    Attributes:
        numel: the number of elements of the vector.
        parts: the number of parts.
        dtype: the dtype of the elements.
    """

    numel: int
    parts: int
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Return the number of elements of a full part."""
        return -(-self.numel // self.parts)

    @property
    def nbytes(self) -> int:
        """Return the bytes of a full part."""
        return self.length * self.dtype.itemsize

    def slices(self) -> list[slice]:
        """Return the slice of each part."""
        ends = [min(self.numel, part * self.length) for part in range(self.parts + 1)]
        return [slice(start, stop) for start, stop in pairwise(ends)]

    def read(self, content: Tensor, part: int) -> Tensor:
        """Copy a part's elements from the bytes of a message."""
        where = self.slices()[part]
        return content[: (where.stop - where.start) * self.dtype.itemsize].clone().view(self.dtype)


@dataclass
class MessageReduction:
    """One attempt to average a gradient among members: a reduce-scatter and an all-gather by messages.

    The i-th member averages the i-th part for all; members beyond the number of parts average none. Gradients are added
    in rank order, so that the mean of the same members has the same bits in every attempt.

    Attributes:
        partition: the partition of the gradient.
        rank: this member.
        members: the members in rank order, at least as many as parts.
        step: the training step.
        attempt: the attempt at that step.
        received: every member's gradient of the own part, by rank.
        means: the known means, by part.
        sent: whether the own gradient was sent.
        acknowledged: whether ACK was sent for the complete mean.
    """

    partition: Partition
    rank: int
    members: tuple[int, ...]
    step: int = 0
    attempt: int = 0
    received: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    means: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    sent: bool = False
    acknowledged: bool = False

    @property
    def own(self) -> int:
        """Return the part that this member averages; `partition.parts` or more if it averages none."""
        return self.members.index(self.rank)

    @property
    def can_average(self) -> bool:
        """Return True if all gradients of the own part have arrived and are not averaged yet."""
        own = self.own
        return own < self.partition.parts and own not in self.means and len(self.received) == len(self.members)

    @property
    def done(self) -> bool:
        """Return True if the mean of every part is known."""
        return len(self.means) == self.partition.parts

    @property
    def has_work(self) -> bool:
        """Return True if this member has something to compute or to send."""
        return not self.sent or self.can_average or (self.done and not self.acknowledged)

    def receive(self, src: int, chunk: GradientChunk) -> None:
        """Handle a part from another member."""
        content = self.partition.read(chunk.content, chunk.part)
        if chunk.reduced:
            self.means[chunk.part] = content
        else:
            self.received[src] = content

    def advance(self, gradient: Tensor) -> list[tuple[int, GradientChunk]]:
        """Return the chunks to send now, with destinations; average the own part if possible."""
        outbox: list[tuple[int, GradientChunk]] = []
        own, slices, size = self.own, self.partition.slices(), len(self.members)
        if not self.sent:
            self.sent = True
            if own < self.partition.parts:
                self.received[self.rank] = gradient[slices[own]].cpu()
            # Each member starts with the one after itself, so that not all send to the same one at once.
            for part in ((own + offset) % size for offset in range(1, size)):
                if part < self.partition.parts:
                    content = gradient[slices[part]].cpu()
                    outbox.append((self.members[part], GradientChunk(self.step, self.attempt, part, 0, content)))
        if self.can_average:
            parts = [self.received[rank] for rank in self.members]
            # In fp16 a sum can overflow although the mean is finite.
            half = parts[0].dtype == torch.float16
            mean = reduce(torch.add, [part / size for part in parts]) if half else reduce(torch.add, parts) / size
            self.means[own] = mean
            chunk = GradientChunk(self.step, self.attempt, own, 1, mean)
            outbox += [(rank, chunk) for rank in self.members if rank != self.rank]
        return outbox

    def write_(self, vector: Tensor) -> None:
        """Overwrite a vector with the mean."""
        for part, where in enumerate(self.partition.slices()):
            vector[where].copy_(self.means[part])
