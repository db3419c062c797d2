# SPDX-License-Identifier: Apache-2.0
"""Long text read in windows: passages that belong to a speaker, a package or an article."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.lab.tasks.data.base import Batch, ExampleMetadata, Indices, Shard, Stream, sample

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Document:
    """A piece of text.

    Args:
        group: the package, speaker or article that it belongs to.
        text: its bytes.
    """

    group: str
    text: bytes


@dataclass(frozen=True, eq=False)
class Passages:
    """Random windows of a worker's passages, which are joined in the order of the text.

    Args:
        text: uint8, all text to train on.
        bounds: [n + 1], where each passage begins, and the end of the last.
        groups: [n], the group of each passage.
        held: uint8, the held-out text.
        context: bytes in a window.
        evaluation_batch: windows per batch of an evaluation.
    """

    text: Bytes
    bounds: Indices
    groups: Indices
    held: Bytes
    context: int = 128
    evaluation_batch: int = 64
    metadata: ExampleMetadata = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ConfigError(f"context={self.context}: must be at least 1 byte, such as 128")
        shortest = min(len(self.text), len(self.held))
        if shortest <= self.context:
            raise ConfigError(
                f"context={self.context}: must be less than the {shortest} bytes of text there are. Use a smaller one"
            )
        metadata = ExampleMetadata(np.diff(self.bounds), self.context + 1, "bytes", groups=self.groups)
        object.__setattr__(self, "metadata", metadata)

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """Two tensors, int64 [batch, context]: the windows, and the same windows one byte later."""
        # Positions count the worker's own bytes; each is mapped to its passage, and from there into the text.
        begins, lengths = self.bounds[shard.indices], self.metadata.weights[shard.indices]
        ends = np.cumsum(lengths)
        stream = Stream((seed, rank, 0x7E87))
        starts = stream.below(shard.units - self.context, step * batch_size, batch_size)
        positions = starts[:, None] + np.arange(self.context + 1)
        passage = np.searchsorted(ends, positions, side="right")
        return _pair(self.text[positions + (begins - ends + lengths)[passage]])

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Steps that read as many bytes as the shard holds."""
        return -(-shard.units // (batch_size * self.context))

    def held_out(self, limit: int | None) -> Iterator[Batch]:
        """Windows that follow each other without overlap; `limit` counts windows."""
        starts = sample((len(self.held) - 1) // self.context, limit) * self.context
        for first in range(0, len(starts), self.evaluation_batch):
            some = starts[first : first + self.evaluation_batch]
            yield _pair(self.held[some[:, None] + np.arange(self.context + 1)])


def passages(train: Sequence[Document], held: Sequence[Document], *, context: int, nbytes: int) -> Passages:
    """Cut documents at line ends into passages of about `nbytes`, which can be split among workers.

    Args:
        train: documents to train on, in order.
        held: held-out documents, in order.
        context: bytes in a window.
        nbytes: a passage ends with the line in which it reaches this length, or with its document.
    """
    names = sorted({document.group for document in train})
    code = {name: number for number, name in enumerate(names)}
    lengths: list[int] = []
    groups: list[int] = []
    for document in train:
        pieces = _lengths(document.text, nbytes)
        lengths += pieces
        groups += [code[document.group]] * len(pieces)
    bounds = np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]).astype(np.int64)
    text, rest = (
        np.frombuffer(b"".join(document.text for document in documents), np.uint8) for documents in (train, held)
    )
    return Passages(text, bounds, np.array(groups, np.int64), rest, context)


def _lengths(text: bytes, nbytes: int) -> list[int]:
    lengths: list[int] = []
    begin = 0
    while begin < len(text):
        newline = text.find(b"\n", begin + nbytes - 1)
        end = len(text) if newline < 0 else newline + 1
        lengths.append(end - begin)
        begin = end
    return lengths


def _pair(windows: Bytes) -> Batch:
    numbers = torch.from_numpy(windows.astype(np.int64))
    return numbers[:, :-1], numbers[:, 1:]
