"""Batches, shards and draws: the vocabulary that every data set shares.

Draws are counter based: the i-th word of a stream is a function of (key, i) alone, so a batch is a function of
(shard, step, batch size, seed, rank) and a resumed run needs no sampler state.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Batch = tuple[Tensor, ...]
"""What the model is called with, then, last, the targets."""
Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Shard:
    """One worker's part of the training data.

    Args:
        indices: the examples (for a language model: passages) that are this worker's own, ascending.
        units: how much that is: examples, or bytes for a language model.
    """

    indices: Indices
    units: int

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, eq=False)
class Census:
    """What a split may look at: one entry for each training example.

    Args:
        weights: units in each example: ones, or bytes of each passage.
        minimum: units that a shard needs to be worth training on.
        unit: the word for a unit in messages.
        labels: the class of each example, where there is one.
        groups: the speaker or package of each example, where there is one.
    """

    weights: Indices
    minimum: int = 8
    unit: str = "examples"
    labels: Indices | None = None
    groups: Indices | None = None

    def __len__(self) -> int:
        return len(self.weights)


class Data(Protocol):
    """Training examples to draw from, and held-out ones to measure on."""

    @property
    def census(self) -> Census:
        """What a split may look at."""
        ...

    def batch(self, shard: Shard, step: int, *, batch_size: int, seed: int, rank: int) -> Batch:
        """The batch of one step: a pure function of the arguments."""
        ...

    def steps_per_epoch(self, shard: Shard, batch_size: int) -> int:
        """Steps after which every unit of the shard was drawn once, or would have been on average."""
        ...

    def held_out(self, limit: int | None) -> Iterator[Batch]:
        """Batches of held-out examples, at most `limit` of them, always the same."""
        ...


@dataclass(frozen=True)
class Stream:
    """An endless stream of random 64-bit words; equal keys give equal streams, on every machine.

    Args:
        key: what the stream is for: seed, rank, purpose.
    """

    key: tuple[int, ...]
    origin: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        origin = len(self.key)
        for part in self.key:
            origin = int(_mix(np.array([(origin * _GOLDEN + part) & _MASK], np.uint64))[0])
        object.__setattr__(self, "origin", origin)

    def words(self, first: int, count: int) -> Words:
        """The words at positions `first` to `first + count - 1`."""
        start = np.array([(self.origin + first * _GOLDEN) & _MASK], np.uint64)
        return _mix(start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN))

    def permutation(self, n: int) -> Indices:
        """The numbers 0 to n - 1 in an order of the stream's own."""
        return np.argsort(self.words(0, n), kind="stable")

    def below(self, bound: int, first: int, count: int) -> Indices:
        """`count` whole numbers in [0, bound), from position `first` on."""
        return (self.words(first, count) % np.uint64(bound)).astype(np.int64)

    def generator(self) -> np.random.Generator:
        """NumPy's own generator, keyed by the stream, for draws that are not uniform."""
        return np.random.Generator(np.random.Philox(key=self.words(0, 2)))


def sample(count: int, limit: int | None) -> Indices:
    """At most `limit` of the numbers 0 to count - 1, ascending, always the same.

    They are chosen by chance: files are often ordered in a cycle of classes, which even steps would keep time with.
    """
    return np.sort(Stream((0x10C,)).permutation(count)[:limit])


def _mix(words: Words) -> Words:
    # The finaliser of SplitMix64 (Steele, Lea, Flood 2014): every input bit moves every output bit.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
