"""Sets of separate examples: images, feature rows, sentences."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.tasks.data.base import Batch, Census, Indices, Shard, Stream, Words, sample


class Table(Protocol):
    """Rows that can be taken by number."""

    def __len__(self) -> int:
        """How many rows there are."""
        ...

    def take(self, rows: Indices, draws: Words | None = None) -> Batch:
        """These rows as a batch; `draws`, one random word a row, asks for augmentation where there is any."""
        ...


@dataclass(frozen=True, eq=False)
class Images:
    """Pictures and their classes.

    Args:
        pixels: uint8, [n, channels, height, width]; may be a memory map.
        labels: int64, [n].
        mean: of a channel, in [0, 1]; taken away.
        deviation: of a channel; divided by.
        shift: pixels by which augmentation moves a picture, up to, in each direction; it also mirrors it.
    """

    pixels: NDArray[np.uint8]
    labels: Indices
    mean: float = 0.5
    deviation: float = 0.25
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices, draws: Words | None = None) -> Batch:
        """float32 [batch, channels, height, width], and classes [batch]."""
        pixels = self.pixels[rows]
        if draws is not None and self.shift:
            pixels = _jitter(pixels, draws, self.shift)
        scaled = torch.from_numpy(pixels).float().sub_(255 * self.mean).div_(255 * self.deviation)
        return scaled, torch.from_numpy(self.labels[rows])


@dataclass(frozen=True, eq=False)
class Rows:
    """Feature rows and their classes.

    Args:
        features: [n, features]; given to the model as float32.
        labels: int64, [n].
    """

    features: NDArray[np.uint8]
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices, draws: Words | None = None) -> Batch:
        """float32 [batch, features], and classes [batch]."""
        return torch.from_numpy(self.features[rows]).float(), torch.from_numpy(self.labels[rows])


@dataclass(frozen=True, eq=False)
class Texts:
    """Texts and their classes.

    Args:
        numbers: int32, [n, length], token numbers, 0 for padding.
        labels: int64, [n].
    """

    numbers: NDArray[np.int32]
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices, draws: Words | None = None) -> Batch:
        """int64 [batch, longest], and classes [batch]."""
        return trimmed(self.numbers, rows), torch.from_numpy(self.labels[rows])


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """Examples drawn epoch by epoch, each once an epoch, in an order of the epoch's own.

    Every batch is full: the last of an epoch goes on into the next epoch's order.

    Args:
        train: rows to train on.
        test: rows held out.
        census: what a split may look at; classes at least, where there are any.
        evaluation_batch: rows measured at a time.
    """

    train: Table
    test: Table
    census: Census
    evaluation_batch: int = 256

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """Draws `step * batch_size` and on, of the endless row of epochs."""
        first = step * batch_size
        positions = np.arange(first, first + batch_size)
        epochs = positions // len(shard)
        rows = np.empty(batch_size, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = _order(len(shard), seed, rank, int(epoch))[positions[here] % len(shard)]
        draws = Stream((seed, rank, 0xA06)).words(first, batch_size)
        return self.train.take(shard.indices[rows], draws)

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Steps after which every example was drawn at least once."""
        return -(-len(shard) // batch_size)

    def held_out(self, limit: int | None) -> Iterator[Batch]:
        """Test rows, without augmentation."""
        rows = sample(len(self.test), limit)
        for first in range(0, len(rows), self.evaluation_batch):
            yield self.test.take(rows[first : first + self.evaluation_batch])


def labelled(train: Images | Rows | Texts, test: Images | Rows | Texts) -> ExampleSet:
    """A set whose census is its classes."""
    return ExampleSet(train, test, Census(np.ones(len(train), np.int64), labels=train.labels))


@lru_cache(maxsize=64)
def _order(n: int, seed: int, rank: int, epoch: int) -> Indices:
    return Stream((seed, rank, 0xE90C, epoch)).permutation(n)


def _jitter(pixels: NDArray[np.uint8], draws: Words, shift: int) -> NDArray[np.uint8]:
    """Move each picture by up to `shift` pixels, its edge repeated, and mirror every second one."""
    n, _, height, width = pixels.shape
    span = np.uint64(2 * shift + 1)
    down = (draws % span).astype(np.int64)[:, None] - shift
    across = (draws // span % span).astype(np.int64)[:, None] - shift
    rows = np.clip(np.arange(height) + down, 0, height - 1)
    columns = np.clip(np.arange(width) + across, 0, width - 1)
    mirrored = (draws >> np.uint64(63)).astype(bool)
    columns[mirrored] = columns[mirrored, ::-1]
    moved = pixels[np.arange(n)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(moved.transpose(0, 3, 1, 2))


def padded(sentences: list[list[int]], length: int) -> NDArray[np.int32]:
    """Token numbers, [n, length], cut or filled up with 0."""
    table = np.zeros((len(sentences), length), np.int32)
    for row, sentence in zip(table, sentences, strict=True):
        row[: len(sentence)] = sentence[:length]
    return table


def trimmed(table: NDArray[np.int32], rows: Indices) -> Tensor:
    """These rows as int64 [batch, longest], without the columns that are padding in all of them."""
    chosen = table[rows]
    longest = max(int((chosen != 0).sum(1).max()), 1)
    return torch.from_numpy(chosen[:, :longest].astype(np.int64))
