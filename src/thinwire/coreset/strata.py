r"""Clusters as strata: draws whose weighted gradient is right on average, wherever the model is.

A medoid tells its cluster's gradient well near the model it was selected by, and nothing of what becomes of the cluster
as the model moves. Drawing several members of each cluster instead, cluster $j$ of $N_j$ points giving $m_j$ of them
without replacement, each with weight $N_j/m_j$, is unbiased everywhere. Neyman's allocation, $m_j \propto N_j\sigma_j$,
has the least variance for a given number of draws (Neyman 1934, On the Two Different Aspects of the Representative
Method). Half as many clusters as draws leave room for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.coreset.similarity import Distances
from thinwire.coreset.subset import Subset, keyed
from thinwire.errors import ConfigError

_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Strata:
    """Every point's stratum, and how many points each stratum gives.

    Args:
        members: int64, [n]; the stratum of each point, from 0.
        draws: int64, [strata]; how many points each gives, at least 1 and at most what it has.

    Raises:
        ConfigError: a stratum is empty, or gives nothing or more than it has.
    """

    members: Tensor
    draws: Tensor

    def __post_init__(self) -> None:
        sizes = torch.bincount(self.members, minlength=len(self.draws))
        if len(sizes) != len(self.draws) or not bool(((self.draws >= 1) & (self.draws <= sizes)).all()):
            raise ConfigError(
                f"draws={self.draws.tolist()} of strata of {sizes.tolist()}: each must give at least 1 and has no more"
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
            key: of the draw, such as a seed and an epoch; equal keys give equal draws.
        """
        order = torch.randperm(self.n, generator=keyed(*key, 0x57A7))
        order = order[self.members[order].argsort(stable=True)]
        sizes = torch.bincount(self.members, minlength=len(self.draws))
        place = torch.arange(self.n) - (sizes.cumsum(0) - sizes)[self.members[order]]
        taken = order[place < self.draws[self.members[order]]]
        return Subset(taken, (sizes.double() / self.draws)[self.members[taken]], self.n)


def stratify(distances: Distances, medoids: Tensor, budget: int, *, labels: Tensor | None = None) -> Strata:
    """Cluster all points around medoids and allot the draws.

    Args:
        distances: between points.
        medoids: int64, [m]; numbers of points, the earlier one wins where distances are equal.
        budget: draws in all, at least one a medoid.
        labels: int64, [n]; where given, a point only joins a medoid of its own class.

    Raises:
        ConfigError: the budget is too small, or a class has no medoid.
    """
    nearest, members = _assign(distances, medoids, labels)
    if not bool(torch.isfinite(nearest).all()):
        raise ConfigError("medoids: a class has none; select per class")
    squares = torch.zeros(len(medoids), dtype=torch.float64).index_add_(0, members, nearest.double().square())
    sizes = torch.bincount(members, minlength=len(medoids))
    return Strata(members, allocate(sizes, (squares / sizes).sqrt(), budget))


def allocate(sizes: Tensor, deviations: Tensor, budget: int) -> Tensor:
    """Neyman's allocation in whole numbers: in proportion to size times deviation, at least 1, at most the size.

    Args:
        sizes: int64, [m]; points of each stratum.
        deviations: float64, [m]; how widely each is spread.
        budget: draws in all.

    Returns:
        int64, [m], with the budget as its sum.

    Raises:
        ConfigError: the budget cannot be met.
    """
    if not len(sizes) <= budget <= int(sizes.sum()):
        raise ConfigError(f"budget={budget}: {len(sizes)} strata of {int(sizes.sum())} points need one draw each")
    given = torch.ones_like(sizes)
    # A stratum without spread still takes draws once the others are exhausted.
    need = sizes.double() * deviations + 1e-12 * (1 + float((sizes * deviations).max()))
    while (left := budget - int(given.sum())) > 0:
        free = given < sizes
        wanted = torch.where(free, need, 0.0)
        due = (wanted * (left / wanted.sum())).floor().long()
        if int(due.sum()) == 0:
            due = torch.zeros_like(sizes)
            due[torch.where(free, need / (given * (given + 1.0)).sqrt(), -1.0).argmax()] = 1
        given = torch.minimum(given + due, sizes)
    return given


def _assign(distances: Distances, medoids: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """Every point's distance to its nearest medoid, and that medoid's place, both [n] on the CPU."""
    nearest = torch.full((distances.n,), torch.inf)
    members = torch.zeros(distances.n, dtype=torch.int64)
    for first in range(0, len(medoids), _BLOCK):
        block = medoids[first : first + _BLOCK].cpu()
        apart = distances.between(block).float().cpu()
        if labels is not None:
            apart = apart.masked_fill(labels.cpu()[:, None] != labels.cpu()[block], torch.inf)
        least, place = apart.min(1)
        closer = least < nearest
        nearest[closer], members[closer] = least[closer], place[closer] + first
    # Duplicates of a medoid may lie nearer to an earlier one; a medoid always stays with itself.
    members[medoids.cpu()], nearest[medoids.cpu()] = torch.arange(len(medoids)), 0.0
    return nearest, members
