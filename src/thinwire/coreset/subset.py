# SPDX-License-Identifier: Apache-2.0
r"""Weighted subsets of the points: `Coreset` as selected, `Subset` as visited in an epoch, `Strata` to draw from.

The weight of a medoid gives its cluster's gradient only near the model it was selected with. Drawing several members
of each cluster instead, $m_j$ of the $N_j$ points of cluster $j$ without replacement, each with weight $N_j/m_j$, is
unbiased for every model. Neyman's allocation, $m_j \propto N_j\sigma_j$, has the least variance for a given number of
draws (Neyman 1934, On the Two Different Aspects of the Representative Method). Half as many clusters as draws leave
room for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.core.storage.files import local_path, write_atomically
from thinwire.coreset.similarity import Distances, distances_to
from thinwire.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Subset:
    """Chosen points with weights, in the order in which they are to be visited where it is not shuffled.

    Args:
        indices: int64, [k]; numbers of points.
        weights: float64, [k]; the number of points that each represents, so that they sum to about n.
        n: points to choose from.

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
            raise ConfigError("weights: every one must be a positive number. Leave out points without weight")

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def scaled(self) -> Tensor:
        """The weights with mean 1, float64 [k], so that the learning rate for all points stays right."""
        return self.weights * (len(self) / self.weights.sum())

    @classmethod
    def of(cls, chosen: Coreset | Subset) -> Subset:
        """Return a selection as a subset on the CPU."""
        return cls(chosen.indices.cpu(), chosen.weights.cpu().double(), chosen.n)

    @classmethod
    def whole(cls, n: int) -> Subset:
        """Return all points, each with weight 1."""
        return cls(torch.arange(n, device="cpu"), torch.ones(n, dtype=torch.float64, device="cpu"), n)


def budget_of(fraction: float, n: int) -> int:
    """Return the number of points in a fraction of `n`: rounded, and at least 1.

    Raises:
        ConfigError: the fraction is not in (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction={fraction}: must lie in (0, 1]. 0.1 is usual")
    return max(1, round(fraction * n))


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}"


def keyed(*key: int) -> torch.Generator:
    """Return a random generator for a key: equal keys give equal draws on every rank and in every run."""
    words = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)


# -- the result of a selection -----------------------------------------------------------------------------------------


_KEYS = ("indices", "weights", "gains")


@dataclass(frozen=True, eq=False)
class Coreset:
    r"""Chosen points with weights.

    Args:
        indices: int64, [k]; numbers of the points in greedy order, so that every prefix is a coreset of its own
            budget. With labels the classes' orders are interleaved in the ratio of their budgets.
        weights: float64, [k]; the number of points that each represents, itself included. They sum to n, and per
            class to the points of the class.
        gains: float64, [k]; the reduction of the cost by each when it was chosen. Before a class's first, all its
            points count with a distance that exceeds all distances between points.
        cost: $L(S)=\sum_i\min_{j\in S}d_{ij}$.
        n: points to choose from.
        method: of the selection.
    """

    indices: Tensor
    weights: Tensor
    gains: Tensor
    cost: float
    n: int
    method: str = "lazy"

    def __len__(self) -> int:
        return len(self.indices)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            OSError: the file could not be written; an earlier one is unchanged.
        """
        from safetensors.torch import save

        tensors = {key: getattr(self, key).contiguous().cpu() for key in _KEYS}
        # Hexadecimal, so that the cost is read back bit for bit.
        facts = {"cost": self.cost.hex(), "n": str(self.n), "method": self.method}
        write_atomically(local_path(path), save(tensors, metadata=facts))

    @classmethod
    def load(cls, path: str | Path) -> Coreset:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or holds no coreset.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with torch.device("cpu"), safe_open(str(local_path(path)), "pt") as file:
                facts = file.metadata() or {}
                tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in _KEYS}
            cost, n = float.fromhex(facts["cost"]), int(facts["n"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: holds no coreset ({error}). Give a file that Coreset.save wrote") from None
        return cls(**tensors, cost=cost, n=n, method=facts.get("method", "lazy"))


# -- strata ------------------------------------------------------------------------------------------------------------


_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Strata:
    """The stratum of every point, and the number of draws from each stratum.

    Args:
        members: int64, [n]; the stratum of each point, from 0.
        draws: int64, [strata]; points drawn from each, at least 1 and at most all.

    Raises:
        ConfigError: a stratum is empty, or has no draws or more than points.
    """

    members: Tensor
    draws: Tensor

    def __post_init__(self) -> None:
        sizes = torch.bincount(self.members, minlength=len(self.draws))
        if len(sizes) != len(self.draws) or not bool(((self.draws >= 1) & (self.draws <= sizes)).all()):
            raise ConfigError(
                f"draws={self.draws.tolist()} of strata of {sizes.tolist()}: each needs at least 1 draw, at most all"
            )

    @property
    def n(self) -> int:
        """Points in all strata."""
        return len(self.members)

    def __len__(self) -> int:
        return int(self.draws.sum())

    def draw(self, *key: int) -> Subset:
        r"""Points drawn from every stratum without replacement, each with weight $N_j/m_j$.

        Args:
            key: such as a seed and an epoch; equal keys give equal draws.
        """
        order = torch.randperm(self.n, generator=keyed(*key, 0x57A7), device="cpu")
        # A stable sort by stratum keeps the random order within each, so its first points are a random draw.
        order = order[self.members[order].argsort(stable=True)]
        sizes = torch.bincount(self.members, minlength=len(self.draws))
        place = torch.arange(self.n, device="cpu") - (sizes.cumsum(0) - sizes)[self.members[order]]
        taken = order[place < self.draws[self.members[order]]]
        return Subset(taken, (sizes.double() / self.draws)[self.members[taken]], self.n)


def stratify(distances: Distances, medoids: Tensor, budget: int, *, labels: Tensor | None = None) -> Strata:
    """Cluster all points around medoids, and allocate the draws.

    Args:
        distances: between points.
        medoids: int64, [m]; numbers of points; where distances are equal the first one wins.
        budget: draws in all, at least one for each medoid.
        labels: int64, [n]; where given, a point is only assigned to a medoid of its own class.

    Raises:
        ConfigError: the budget is too small, or a class has no medoid.
    """
    nearest, members = _assign(distances, medoids, labels)
    if not bool(torch.isfinite(nearest).all()):
        raise ConfigError("medoids: a class has none. Select per class")
    squares = torch.zeros(len(medoids), dtype=torch.float64, device="cpu").index_add_(
        0, members, nearest.double().square()
    )
    sizes = torch.bincount(members, minlength=len(medoids))
    return Strata(members, allocate(sizes, (squares / sizes).sqrt(), budget))


def allocate(sizes: Tensor, deviations: Tensor, budget: int) -> Tensor:
    """Neyman's allocation in whole numbers: in proportion to size times deviation, at least 1, at most the size.

    Args:
        sizes: int64, [m]; points of each stratum.
        deviations: float64, [m]; the root mean square distance from the medoid.
        budget: draws in all.

    Returns:
        int64, [m], with the budget as its sum.

    Raises:
        ConfigError: the budget cannot be met.
    """
    if not len(sizes) <= budget <= int(sizes.sum()):
        raise ConfigError(f"budget={budget}: {len(sizes)} strata of {int(sizes.sum())} points need one draw each")
    given = torch.ones_like(sizes)
    # The small constant lets strata without spread take draws once the others are exhausted.
    need = sizes.double() * deviations + 1e-12 * (1 + float((sizes * deviations).max()))
    while (left := budget - int(given.sum())) > 0:
        free = given < sizes
        wanted = torch.where(free, need, 0.0)
        # Rounded down, so that the budget is not exceeded; the rest is given in further rounds.
        due = (wanted * (left / wanted.sum())).floor().long()
        if int(due.sum()) == 0:
            # Less than one for each: the next draw goes where it reduces the variance most.
            due = torch.zeros_like(sizes)
            due[torch.where(free, need / (given * (given + 1.0)).sqrt(), -1.0).argmax()] = 1
        given = torch.minimum(given + due, sizes)
    return given


def _assign(distances: Distances, medoids: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return every point's distance to its nearest medoid, and the position of that medoid; both [n] on the CPU."""
    nearest = torch.full((distances.n,), torch.inf, dtype=torch.float32, device="cpu")
    members = torch.zeros(distances.n, dtype=torch.int64, device="cpu")
    for first in range(0, len(medoids), _BLOCK):
        block = medoids[first : first + _BLOCK].cpu()
        apart = distances_to(distances, block).float().cpu()
        if labels is not None:
            apart = apart.masked_fill(labels.cpu()[:, None] != labels.cpu()[block], torch.inf)
        least, place = apart.min(1)
        closer = least < nearest
        nearest[closer], members[closer] = least[closer], place[closer] + first
    # A medoid that equals an earlier one must still represent itself, or its stratum would be empty.
    members[medoids.cpu()], nearest[medoids.cpu()] = torch.arange(len(medoids), device="cpu"), 0.0
    return nearest, members
