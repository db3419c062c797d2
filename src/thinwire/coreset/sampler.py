# SPDX-License-Identifier: Apache-2.0
"""Chosen points as a torch sampler: deterministic, resumable, divided equally among ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler

from thinwire.coreset.schedule import Selector
from thinwire.coreset.subset import Subset, keyed
from thinwire.errors import CheckpointError, ConfigError

_LOST = 1000  # more than the points of a batch, whose weights `weight_of` may give later


class Point(int):
    """The number of a point, with the point's weight as an attribute.

    It is an ordinary index, and carries the weight into the worker processes of a DataLoader, persistent ones too. A
    process that never reads a weight is warned.
    """

    _weight: float
    _needed: bool
    lost: ClassVar[int] = 0
    """Points of this process whose weight, other than 1, nobody has read."""

    def __new__(cls, number: int, weight: float) -> Point:
        """Return a number with a weight."""
        point = super().__new__(cls, number)
        point._weight, point._needed = weight, weight != 1
        return point

    @property
    def weight(self) -> float:
        """Weight of the point; the mean over an epoch is 1."""
        Point.lost = -(1 << 62)  # this process knows of weights
        return self._weight

    # An int's own pickling would lose the weight on the way to a worker process.
    def __reduce__(self) -> tuple[type[Point], tuple[int, float]]:
        self._needed = False  # there is another one now, which may be read
        return Point, (int(self), self._weight)

    def __del__(self) -> None:
        if self._needed:
            Point.lost += 1
            if Point.lost == _LOST:
                warnings.warn(
                    f"the weights of {_LOST} points of a CraigSampler were not used, so the loss is not that of all "
                    "points. Wrap the data set, Weighted(dataset), and multiply each loss by its weight",
                    stacklevel=2,
                )


class Mapped(Protocol):
    """A map-style data set."""

    def __getitem__(self, index: int, /) -> Any:
        """One example."""
        ...

    def __len__(self) -> int:
        """Number of examples."""
        ...


class Weighted(Dataset[Any]):
    """A data set whose examples have their weights as an additional last element.

    Args:
        examples: a map-style data set of tuples.
    """

    def __init__(self, examples: Mapped) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        weight = index.weight if isinstance(index, Point) else 1.0
        return (*self.examples[int(index)], torch.tensor(weight, dtype=torch.float32, device="cpu"))


class CraigSampler(Sampler[int]):
    """The chosen points of one epoch after another, for `torch.utils.data.DataLoader(sampler=...)`.

    As with `DistributedSampler`, call `set_epoch` before each epoch; it selects points again where the policy requires
    it. Every rank gets every `size`-th point of one common order, so that all ranks have equally many. Weights have
    mean 1 over the whole subset, so that the learning rate for all points stays right::

        loader = DataLoader(Weighted(dataset), batch_size=32, sampler=sampler, num_workers=2)
        for epoch in range(100):
            sampler.set_epoch(epoch)
            for x, y, weight in loader:
                loss = (weight * F.cross_entropy(model(x), y, reduction="none")).mean()

    Args:
        source: a selector, or one constant subset.
        rank: of this worker.
        size: number of workers; those with equal models and seeds choose the same points.
        shuffle: visit points in a different order each epoch; otherwise in the order chosen.
        pad: where the subset cannot be divided evenly, repeat the first points; otherwise leave out the last.
        seed: of the orders.

    Raises:
        ConfigError: the rank is out of range, or a subset has fewer points than there are ranks.
    """

    def __init__(
        self,
        source: Selector | Subset,
        *,
        rank: int = 0,
        size: int = 1,
        shuffle: bool | None = None,
        pad: bool = True,
        seed: int = 0,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank={rank}: must lie in 0..{size - 1} for {size} workers")
        ordered = isinstance(source, Selector) and source.policy.ordered
        self.source = source
        self.rank = rank
        self.size = size
        self.shuffle = not ordered if shuffle is None else shuffle
        self.pad = pad
        self.seed = seed
        self.epoch = 0
        self._start = 0
        self._yielded = 0

    @property
    def subset(self) -> Subset:
        """The points of this epoch, of all ranks together."""
        return self.source if isinstance(self.source, Subset) else self.source.subset(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Start an epoch, and choose its points now if a selection is due."""
        self.epoch, self._start, self._yielded = epoch, 0, 0
        self._check(self.subset)

    def weight_of(self, indices: Tensor) -> Tensor:
        """Return the weights of points, like `indices`, with mean 1 over the subset; 0 for points that are not in it.

        A point that was chosen twice (by `Crest`) has a weight for each time; use those of the `Point` objects then.
        """
        Point.lost = -(1 << 62)
        subset = self.subset
        table = torch.zeros(subset.n, dtype=torch.float64, device="cpu")
        table[subset.indices] = subset.scaled
        return table[indices.cpu()].float().to(indices.device)

    def __len__(self) -> int:
        """Points of this rank in a whole epoch.

        Raises:
            ConfigError: a `DistributedSampler` asks, which would take the sampler for a data set.
        """
        if isinstance(sys._getframe(1).f_locals.get("self"), DistributedSampler):  # pyright: ignore[reportPrivateUsage]
            raise ConfigError(
                "DistributedSampler(CraigSampler) would yield positions in the subset, not points. A CraigSampler "
                "divides its points among ranks itself. Use CraigSampler(source, rank=rank, size=world_size)"
            )
        k = len(self.subset)
        return -(-k // self.size) if self.pad else k // self.size

    def __iter__(self) -> Iterator[int]:
        subset, places = self.subset, self.places()[self._start :]
        # A restored position counts for the first iteration only.
        self._yielded, self._start = self._start, 0
        pairs = zip(subset.indices[places].tolist(), subset.scaled[places].tolist(), strict=True)
        for number, weight in pairs:
            # Counted before the yield: the consumer may stop the iteration there.
            self._yielded += 1
            yield Point(number, weight)

    def places(self) -> Tensor:
        """Positions in the subset of this rank's points of the epoch, in the order of visits, int64."""
        k = self._check(self.subset)
        order = torch.arange(k, device="cpu")
        if self.shuffle:
            # Sorted by number first, so that the visits do not depend on the order of selection.
            shuffled = torch.randperm(k, generator=keyed(self.seed, self.epoch, 0x0DE2), device="cpu")
            order = self.subset.indices.argsort(stable=True)[shuffled]
        whole = len(self) * self.size
        # A subset has at least as many points as there are ranks, so padding repeats at most one point on each rank.
        return torch.cat([order, order])[:whole][self.rank :: self.size]

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return this rank's position, and the points chosen.

        Args:
            consumed: points of this epoch that the loop has used; by default those yielded. Pass it where the
                DataLoader has worker processes, which read ahead of the loop.
        """
        state = self.source.state_dict() if isinstance(self.source, Selector) else None
        return {"epoch": self.epoch, "consumed": self._yielded if consumed is None else consumed, "source": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned: the next iteration yields the rest of its epoch.

        Raises:
            CheckpointError: it does not belong to this sampler.
        """
        if (state["source"] is not None) != isinstance(self.source, Selector):
            raise CheckpointError("the sampler was saved with another kind of source. Construct it as before")
        if isinstance(self.source, Selector):
            self.source.load_state_dict(state["source"])
        self.epoch, self._start = state["epoch"], state["consumed"]
        self._yielded = self._start

    def _check(self, subset: Subset) -> int:
        if len(subset) < self.size:
            raise ConfigError(
                f"{len(subset)} points for {self.size} ranks: give every rank at least one. Raise fraction"
            )
        return len(subset)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of weighted losses, [batch] each: the loss to train on, for weights with mean 1 over an epoch."""
    return (losses * weights.to(losses)).mean()
