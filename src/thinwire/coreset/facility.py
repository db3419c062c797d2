r"""Facility location: what one more representative would save, and who is nearest to whom.

$F(S)=\sum_i\max(0, d_0-\min_{j\in S}d_{ij})$ with $d_0$ above all distances; the gain of a candidate $e$ is
$\sum_i\max(0, m_i-d_{ie})$ with $m_i$ the distance of point i to its nearest representative so far.

Distances are measured in units of $d_0$, a power of two, and rounded to multiples of $2^{-23}$ of it. Sums of such
numbers in float64 are exact, and therefore the same in any order: neither the block a candidate is in, nor the thread
or the rank that holds a point, can change a gain, and equal gains are equal bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.coreset.similarity import Distances, power_above, to_rows

Gains: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64]
_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}


class Facility(ABC):
    """What the greedy methods see of the points.

    Attributes:
        n: candidates, which are numbered from 0.
        points: how many points are to be represented.
        unit: the distance that gains are measured in.
        block: how many candidates are best asked for at a time.
    """

    n: int
    points: int
    unit: float
    block: int

    @abstractmethod
    def gains(self, candidates: Numbers) -> Gains:
        """What each of the candidates would save now, [m]."""

    @abstractmethod
    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative, the one of this position."""

    @abstractmethod
    def cost(self) -> float:
        """The sum of all points' distances to their nearest representatives, in units."""

    @abstractmethod
    def sizes(self, count: int) -> Tensor:
        """How many points each of so many representatives speaks for, int64 [count]."""


class Nearest(ABC):
    """The nearest representative of each of some points with coordinates."""

    n: int

    @abstractmethod
    def of(self, points: Tensor) -> Tensor:
        """The coordinates of some of the points, float32 [m, d]."""

    @abstractmethod
    def gains(self, rows: Tensor) -> Gains:
        """What candidates with these coordinates, float32 [m, d], would save."""

    @abstractmethod
    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make coordinates [d] a representative; `own` is the number of the point that has them, if it is here."""

    @abstractmethod
    def cost(self) -> float:
        """The sum of the points' distances to their nearest representatives."""

    @abstractmethod
    def representatives(self) -> Tensor:
        """The position of the nearest representative of each point, int64 [n]; the earlier one of two as near."""


class TorchNearest(Nearest):
    """On any device, by matrix products in float64.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
    """

    def __init__(self, rows: Tensor) -> None:
        self.n = len(rows)
        self._rows = rows
        self._near = torch.ones(self.n, device=rows.device)
        self._who = torch.zeros(self.n, dtype=torch.int64, device=rows.device)

    def of(self, points: Tensor) -> Tensor:
        """The coordinates of some of the points."""
        return self._rows[points.to(self._rows.device)]

    def gains(self, rows: Tensor) -> Gains:
        """What candidates would save."""
        width = block_of(self.n, _BLOCK_ELEMENTS.get(self._rows.device.type, 1 << 22))
        return np.concatenate([savings(self._near, to_rows(self._rows, part)) for part in rows.split(width)])

    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make coordinates a representative."""
        settle(self._near, self._who, to_rows(self._rows, row[None])[:, 0], position, own)

    def cost(self) -> float:
        """The sum of the distances to the nearest representatives."""
        return float(self._near.sum(dtype=torch.float64))

    def representatives(self) -> Tensor:
        """The position of the nearest representative of each point."""
        return self._who.cpu()


class CoordinateFacility(Facility):
    """Points with coordinates, all of them here.

    Args:
        nearest: of all the points.
        unit: what a distance of 1 is.
        block: candidates at a time.
    """

    def __init__(self, nearest: Nearest, unit: float, *, block: int) -> None:
        self.n = self.points = nearest.n
        self.unit = unit
        self.block = block
        self.nearest = nearest

    def gains(self, candidates: Numbers) -> Gains:
        """What each of the candidates would save now."""
        parts = torch.from_numpy(candidates).split(1024)
        return np.concatenate([self.nearest.gains(self.nearest.of(part)) for part in parts])

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative."""
        self.nearest.take(self.nearest.of(torch.tensor([candidate]))[0], position, candidate)

    def cost(self) -> float:
        """The sum of all distances to the nearest representatives."""
        return self.nearest.cost()

    def sizes(self, count: int) -> Tensor:
        """How many points each representative speaks for."""
        return torch.bincount(self.nearest.representatives(), minlength=count)


class DistanceFacility(Facility):
    """Points known by their distances alone.

    Args:
        distances: between them.
    """

    def __init__(self, distances: Distances) -> None:
        first = distances.between(torch.tensor([0]))
        self.n = self.points = distances.n
        # By the triangle inequality no two points are further apart than both are from the first.
        self.unit = power_above(2 * float(first.max()))
        self._distances = distances
        self._near = torch.ones(self.n, device=first.device)
        self._who = torch.zeros(self.n, dtype=torch.int64, device=first.device)
        self.block = min(64, block_of(self.n, _BLOCK_ELEMENTS.get(first.device.type, 1 << 22)))

    def gains(self, candidates: Numbers) -> Gains:
        """What each of the candidates would save now."""
        parts = torch.from_numpy(candidates).split(self.block)
        return np.concatenate([savings(self._near, self._apart(part)) for part in parts])

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate a representative."""
        settle(self._near, self._who, self._apart(torch.tensor([candidate]))[:, 0], position, candidate)

    def cost(self) -> float:
        """The sum of all distances to the nearest representatives."""
        return float(self._near.sum(dtype=torch.float64))

    def sizes(self, count: int) -> Tensor:
        """How many points each representative speaks for."""
        return torch.bincount(self._who, minlength=count).cpu()

    def _apart(self, candidates: Tensor) -> Tensor:
        return (self._distances.between(candidates) / self.unit).float()


def rounded(distances: Tensor) -> Tensor:
    """Distances of at most 1 as multiples of 2^-23, in place."""
    return distances.add_(1).sub_(1).clamp_max_(1)


def savings(near: Tensor, distances: Tensor) -> Gains:
    """What candidates at distances [n, m] would save points that are this near, [n]; float64 [m]."""
    return torch.sub(near[:, None], rounded(distances)).clamp_min_(0).sum(0, dtype=torch.float64).cpu().numpy()


def settle(near: Tensor, who: Tensor, distances: Tensor, position: int, own: int | None) -> None:
    """Give the points that are nearer to a new representative than to any other to it, and it to itself."""
    found = rounded(distances)
    if own is not None:
        found[own] = 0
    closer = found < near
    near[closer] = found[closer]
    who[closer] = position
    if own is not None:
        who[own] = position


def block_of(points: int, elements: int) -> int:
    """How many candidates may be asked for at a time, for so many distances to be held."""
    return max(1, elements // max(points, 1))
