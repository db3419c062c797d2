"""Some of the points, and how many each of them speaks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from thinwire.errors import ConfigError


class Chosen(Protocol):
    """What any selection has, `thinwire.coreset.Coreset` among them."""

    @property
    def indices(self) -> Tensor:
        """int64, [k]."""
        ...

    @property
    def weights(self) -> Tensor:
        """float64, [k]."""
        ...

    @property
    def n(self) -> int:
        """Points there were to choose from."""
        ...


@dataclass(frozen=True, eq=False)
class Subset:
    """Chosen points with weights, in the order in which they are to be visited where it is not shuffled.

    Args:
        indices: int64, [k]; numbers of points.
        weights: float64, [k]; how many points each stands for, so that they sum to about n.
        n: points there were to choose from.

    Raises:
        ConfigError: nothing was chosen, a number is out of range, or a weight is not a positive number.
    """

    indices: Tensor
    weights: Tensor
    n: int

    def __post_init__(self) -> None:
        k = len(self.indices)
        if self.indices.ndim != 1 or self.indices.dtype != torch.int64 or self.weights.shape != (k,):
            raise ConfigError(
                f"indices {_kind(self.indices)} with weights {_kind(self.weights)}: need int64 [k] and as many weights"
            )
        if k == 0:
            raise ConfigError("indices=[]: a subset needs at least 1 point")
        low, high = int(self.indices.min()), int(self.indices.max())
        if low < 0 or high >= self.n:
            raise ConfigError(f"indices from {low} to {high}: must lie in 0..{self.n - 1} for {self.n} points")
        if not bool((torch.isfinite(self.weights) & (self.weights > 0)).all()):
            raise ConfigError("weights: every one must be a positive number; leave out points that stand for nothing")

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def scaled(self) -> Tensor:
        """The weights with mean 1, float64 [k]: under them the learning rate of the whole data holds."""
        return self.weights * (len(self) / self.weights.sum())

    @classmethod
    def of(cls, chosen: Chosen) -> Subset:
        """Any selection as a subset on the CPU."""
        return cls(chosen.indices.cpu(), chosen.weights.cpu().double(), chosen.n)

    @classmethod
    def whole(cls, n: int) -> Subset:
        """All points, each for itself."""
        return cls(torch.arange(n), torch.ones(n, dtype=torch.float64), n)


def budget_of(fraction: float, n: int) -> int:
    """How many of `n` points a fraction is: rounded, and at least 1.

    Raises:
        ConfigError: the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: must lie in (0, 1]; 0.1 is usual")
    return max(1, round(fraction * n))


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def keyed(*key: int) -> torch.Generator:
    """A generator for one purpose: equal keys give equal draws on every rank and in every run."""
    words = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
