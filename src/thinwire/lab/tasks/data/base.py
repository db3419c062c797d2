# SPDX-License-Identifier: Apache-2.0
"""Batches, shards and random draws, as every data set uses them.

Random numbers are counter-based: the i-th number of a stream is a function of (key, i) alone. So a batch is a function
of (shard, step, batch size, seed, rank), and a resumed run needs no sampler state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, ...]
"""The arguments of the model, then the targets."""
Indices = NDArray[np.int64]
RandomBits = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Shard:
    """One worker's part of the training data.

    Args:
        indices: the worker's examples, ascending; for a language model, its passages of text.
        units: how much data that is: examples, or bytes for a language model.
    """

    indices: Indices
    units: int

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class ExampleMetadata:
    """The properties of training examples that a split uses: arrays with one entry per example.

    Args:
        weights: units of data in each example: ones, or the bytes of each passage.
        minimum: the fewest units that a shard may have.
        unit: the word for a unit in errors.
        labels: the class of each example, if it has one.
        groups: the speaker, package or article of each example, if it has one.
    """

    weights: Indices
    minimum: int = 8
    unit: str = "examples"
    labels: Indices | None = None
    groups: Indices | None = None

    def __len__(self) -> int:
        return len(self.weights)


class Data(Protocol):
    """Training examples to draw batches from, and held-out ones for evaluation."""

    @property
    def metadata(self) -> ExampleMetadata:
        """The properties of the training examples."""
        ...

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """The batch of one step: a pure function of the arguments."""
        ...

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Steps after which every unit of the shard was drawn once, exactly or on average."""
        ...

    def held_out(self, limit: int | None) -> Iterator[Batch]:
        """Batches of held-out examples, at most `limit` of them, always the same."""
        ...


@dataclass(frozen=True)
class Stream:
    """A counter-based random generator of 64-bit words; equal keys give equal words on every machine.

    Args:
        key: identifies the stream: seed, rank, and a number for its purpose.

    Example:
        >>> stream = Stream((0, 1))
        >>> stream.below(10, 0, 6).tolist() == stream.below(10, 0, 3).tolist() + stream.below(10, 3, 3).tolist()
        True
    """

    key: tuple[int, ...]
    origin: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        origin = len(self.key)
        for part in self.key:
            origin = int(_mix(np.array([(origin * _GOLDEN + part) & _MASK], np.uint64))[0])
        object.__setattr__(self, "origin", origin)

    def words(self, first: int, count: int) -> RandomBits:
        """Return the random words at positions `first` to `first + count - 1`, uint64."""
        start = np.array([(self.origin + first * _GOLDEN) & _MASK], np.uint64)
        return _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))

    def permutation(self, n: int) -> Indices:
        """Return a random permutation of the numbers 0 to n - 1."""
        return np.argsort(self.words(0, n), kind="stable")

    def below(self, bound: int, first: int, count: int) -> Indices:
        """`count` random integers in [0, bound), from position `first` on."""
        # The bias of the modulo is below bound / 2^64.
        return (self.words(first, count) % np.uint64(bound)).astype(np.int64)

    def generator(self) -> np.random.Generator:
        """Return a generator of NumPy's, seeded by the stream, for draws that are not uniform."""
        return np.random.Generator(np.random.Philox(key=self.words(0, 2)))


def sample(count: int, limit: int | None) -> Indices:
    """Return a random sample of at most `limit` of the numbers 0 to count - 1, ascending, always the same one.

    It is random because files often repeat their classes in a fixed order: numbers at equal distances could all fall
    on one class.
    """
    return np.sort(Stream((0x10C,)).permutation(count)[:limit])


def _mix(words: RandomBits) -> RandomBits:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit affects every output bit.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
