"""Chosen points as a torch sampler: deterministic, resumable, in equal parts for every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from thinwire.coreset.schedule import Selector
from thinwire.coreset.subset import Subset, keyed
from thinwire.errors import CheckpointError, ConfigError


class Point(int):
    """The number of a point, which knows the point's weight.

    It is an index like any other, and the weight travels with it into the worker processes of a DataLoader, persistent
    ones too.

    Attributes:
        weight: with mean 1 over an epoch.
    """

    weight: float

    def __new__(cls, number: int, weight: float) -> Point:
        """A number with a weight."""
        point = super().__new__(cls, number)
        point.weight = weight
        return point

    def __reduce__(self) -> tuple[type[Point], tuple[int, float]]:
        return Point, (int(self), self.weight)


class Mapped(Protocol):
    """A map-style data set."""

    def __getitem__(self, index: int, /) -> Any:
        """One example."""
        ...

    def __len__(self) -> int:
        """How many there are."""
        ...


class Weighted(Dataset[Any]):
    """A data set whose examples come with their weights, as one more, last, element.

    Args:
        examples: a map-style data set of tuples.
    """

    def __init__(self, examples: Mapped) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        weight = index.weight if isinstance(index, Point) else 1.0
        return (*self.examples[int(index)], torch.tensor(weight))


class CraigSampler(Sampler[int]):
    """The chosen points of one epoch after another, for `torch.utils.data.DataLoader(sampler=...)`.

    As with `DistributedSampler`, call `set_epoch` before each epoch; it is then that points are chosen anew where the
    policy says so. Every rank gets every `size`-th point of one common order, so that all parts are of the same length.
    Weights have mean 1 over the whole subset, so the learning rate that suits all the data holds:

        loader = DataLoader(Weighted(dataset), batch_size=32, sampler=sampler, num_workers=2)
        for epoch in range(100):
            sampler.set_epoch(epoch)
            for x, y, weight in loader:
                loss = (weight * F.cross_entropy(model(x), y, reduction="none")).mean()

    Args:
        source: a selector, or one subset for good.
        rank: this worker, from 0.
        size: how many workers there are; all choose alike where their models and seeds are alike.
        shuffle: visit points in an order of the epoch's own; otherwise in the order chosen.
        pad: fill up with the first points again where the subset cannot be divided evenly; otherwise leave out the
            last.
        seed: of the orders.

    Raises:
        ConfigError: there is no such rank, or a subset has fewer points than there are ranks.
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
        self._handed = 0

    @property
    def subset(self) -> Subset:
        """What this epoch visits, on all ranks together."""
        return self.source if isinstance(self.source, Subset) else self.source.subset(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch, and choose its points now if that is due."""
        self.epoch, self._start, self._handed = epoch, 0, 0
        self._check(self.subset)

    def weight_of(self, indices: Tensor) -> Tensor:
        """The weights of points, like `indices`, with mean 1 over the subset; 0 for points that are not in it.

        A point that was chosen twice (`Crest` may) has a weight each time, and only its `Point` knows which.
        """
        subset = self.subset
        table = torch.zeros(subset.n, dtype=torch.float64)
        table[subset.indices] = subset.scaled
        return table[indices.cpu()].float().to(indices.device)

    def __len__(self) -> int:
        """Points of this rank in a whole epoch."""
        k = len(self.subset)
        return -(-k // self.size) if self.pad else k // self.size

    def __iter__(self) -> Iterator[int]:
        subset, places = self.subset, self.places()[self._start :]
        self._handed, self._start = self._start, 0
        pairs = zip(subset.indices[places].tolist(), subset.scaled[places].tolist(), strict=True)
        for number, weight in pairs:
            self._handed += 1
            yield Point(number, weight)

    def places(self) -> Tensor:
        """Where in the subset this rank's points of the epoch are, in the order of visits, int64."""
        k = self._check(self.subset)
        order = torch.arange(k)
        if self.shuffle:
            # By number first, so that equal sets are visited alike in whatever order they were chosen.
            shuffled = torch.randperm(k, generator=keyed(self.seed, self.epoch, 0x0DE2))
            order = self.subset.indices.argsort(stable=True)[shuffled]
        whole = len(self) * self.size
        # No rank gives more than one point twice, for a subset has at least as many points as there are ranks.
        return torch.cat([order, order])[:whole][self.rank :: self.size]

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Where this rank is, and what was chosen.

        Args:
            consumed: points of this epoch that the loop has used. By default those handed out, which is right without
                worker processes; workers read ahead of the loop.
        """
        state = self.source.state_dict() if isinstance(self.source, Selector) else None
        return {"epoch": self.epoch, "consumed": self._handed if consumed is None else consumed, "source": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave: the next iteration yields the rest of its epoch.

        Raises:
            CheckpointError: it does not belong to this sampler.
        """
        if (state["source"] is not None) != isinstance(self.source, Selector):
            raise CheckpointError("the sampler was saved with another kind of source; make it as it was made")
        if isinstance(self.source, Selector):
            self.source.load_state_dict(state["source"])
        self.epoch, self._start = state["epoch"], state["consumed"]
        self._handed = self._start

    def _check(self, subset: Subset) -> int:
        if len(subset) < self.size:
            raise ConfigError(
                f"{len(subset)} points for {self.size} ranks: give every rank at least one; raise fraction"
            )
        return len(subset)


def weighted_mean(losses: Tensor, weights: Tensor) -> Tensor:
    """The mean of weighted losses, [batch] each: the loss to train on, for weights with mean 1 over an epoch."""
    return (losses * weights.to(losses)).mean()
