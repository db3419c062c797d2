# SPDX-License-Identifier: Apache-2.0
"""Data sets of separate examples: images, feature rows, texts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.lab.tasks.data.base import Batch, ExampleMetadata, Indices, RandomBits, Shard, Stream, sample

_SPECIAL = ("<padding>", "<begin>", "<end>", "<unknown>")
UNKNOWN = 3
_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, eq=False)
class Images:
    """Images and their classes.

    Args:
        pixels: uint8, [n, channels, height, width]; may be a memory map.
        labels: int64, [n].
        mean: subtracted from pixels in [0, 1].
        deviation: standard deviation by which they are then divided.
        shift: the most pixels by which augmentation shifts an image in each direction; it also mirrors half of them.
            0 is no augmentation.
    """

    pixels: NDArray[np.uint8]
    labels: Indices
    mean: float = 0.5
    deviation: float = 0.25
    shift: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices, draws: RandomBits | None = None) -> Batch:
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
        features: uint8, [n, features]; the model gets them as float32.
        labels: int64, [n].
    """

    features: NDArray[np.uint8]
    labels: Indices

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Indices, draws: RandomBits | None = None) -> Batch:
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

    def take(self, rows: Indices, draws: RandomBits | None = None) -> Batch:
        """int64 [batch, longest], and classes [batch]."""
        return trimmed(self.numbers, rows), torch.from_numpy(self.labels[rows])


Table = Images | Rows | Texts


@dataclass(frozen=True, eq=False)
class ExampleSet:
    """Examples that are drawn once per epoch, in another random order each epoch.

    Every batch is full: the last batch of an epoch continues with the next epoch's order.

    Args:
        train: examples to train on.
        test: held-out examples.
        metadata: the properties of the training examples.
        evaluation_batch: examples per batch of an evaluation.
    """

    train: Table
    test: Table
    metadata: ExampleMetadata
    evaluation_batch: int = 256

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """Return the examples at positions `step * batch_size` and following in the sequence of all epochs."""
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
        """Held-out examples, without augmentation."""
        rows = sample(len(self.test), limit)
        for first in range(0, len(rows), self.evaluation_batch):
            yield self.test.take(rows[first : first + self.evaluation_batch])


def labelled(train: Table, test: Table) -> ExampleSet:
    """Return a data set in which every training example has a class and weight 1."""
    return ExampleSet(train, test, ExampleMetadata(np.ones(len(train), np.int64), labels=train.labels))


# Cached, because every batch of an epoch needs the order of the whole shard.
@lru_cache(maxsize=64)
def _order(n: int, seed: int, rank: int, epoch: int) -> Indices:
    return Stream((seed, rank, 0xE90C, epoch)).permutation(n)


def _jitter(pixels: NDArray[np.uint8], draws: RandomBits, shift: int) -> NDArray[np.uint8]:
    """Shift each image by up to `shift` pixels, with its edge repeated, and mirror about half of them."""
    # All three choices come from one random word: two remainders for the shifts, the top bit for the mirror.
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
    """Token numbers, [n, length]: sentences cut to this length, or padded with 0."""
    table = np.zeros((len(sentences), length), np.int32)
    for row, sentence in zip(table, sentences, strict=True):
        row[: len(sentence)] = sentence[:length]
    return table


def trimmed(table: NDArray[np.int32], rows: Indices) -> Tensor:
    """These rows as int64 [batch, longest], without the columns that are padding in all of them."""
    chosen = table[rows]
    longest = max(int((chosen != 0).sum(1).max()), 1)
    return torch.from_numpy(chosen[:, :longest].astype(np.int64))


# -- words -------------------------------------------------------------------------------------------------------------


def tokens(text: str) -> list[str]:
    """Words and punctuation marks, in lower case."""
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """Words with numbers from 4 on; 0 to 3 are padding, begin, end and unknown.

    Args:
        words: the words by number.

    Example:
        >>> vocabulary = Vocabulary.of([tokens("the cat, the dog")], size=6, occurrences=1)
        >>> vocabulary.numbers(tokens("The dog"))
        [4, 3]
    """

    words: tuple[str, ...]
    _number: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_number", {word: number for number, word in enumerate(self.words)})

    @classmethod
    def of(cls, sentences: Iterable[list[str]], *, size: int, occurrences: int) -> "Vocabulary":
        """Return the most frequent words of the sentences; ties in alphabetical order.

        Args:
            sentences: as tokens.
            size: the most numbers that are used, with the four special ones.
            occurrences: how often a word must occur; rarer ones are unknown.
        """
        counts = Counter(token for sentence in sentences for token in sentence)
        frequent = sorted((-count, word) for word, count in counts.items() if count >= occurrences)
        return cls(_SPECIAL + tuple(word for _, word in frequent[: size - len(_SPECIAL)]))

    def __len__(self) -> int:
        return len(self.words)

    def numbers(self, sentence: list[str]) -> list[int]:
        """Return the number of each token."""
        return [self._number.get(token, UNKNOWN) for token in sentence]
