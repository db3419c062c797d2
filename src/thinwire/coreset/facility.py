r"""Facility location: what one more representative would save, and who is nearest to whom.

$F(S)=\sum_i\max(0, d_0-\min_{j\in S}d_{ij})$ with $d_0$ above all distances; the gain of a candidate $e$ is
$\sum_i\max(0, m_i-d_{ie})$ with $m_i$ the distance of point i to its nearest representative so far.

Distances are measured in units of $d_0$, a power of two, and rounded to multiples of $2^{-23}$ of it. Sums of such
numbers in float64 are exact, and therefore the same in any order: neither the block a candidate is in, nor the thread
or the rank that holds a point, can change a gain, and equal gains are equal bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from ctypes import CDLL, byref
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.coreset.similarity import Distances, power_above, to_rows
from thinwire.kernels import nearest

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


# -- goals and picks ---------------------------------------------------------------------------------------------------


Progress: TypeAlias = Callable[[float], None]


@dataclass(frozen=True)
class Goal:
    """When to stop.

    Args:
        budget: as soon as there are so many representatives.
        cost: as soon as the cost is not above this, in units of the facility; None for the budget alone.
        told: called with the share that is done.
    """

    budget: int
    cost: float | None = None
    told: Progress | None = None


@dataclass
class Picks:
    """What has been chosen so far, in order; gains and cost in units of the facility."""

    cost: float
    indices: list[int] = field(default_factory=list[int])
    gains: list[float] = field(default_factory=list[float])

    def take(self, facility: Facility, candidate: int, gain: float) -> None:
        """Choose one more."""
        facility.take(candidate, len(self.indices))
        self.add(candidate, gain)

    def add(self, candidate: int, gain: float) -> None:
        """Note one more that has been chosen."""
        self.indices.append(candidate)
        self.gains.append(gain)
        self.cost -= gain

    def done(self, goal: Goal) -> bool:
        """Whether the goal is reached; with nothing chosen it never is."""
        if goal.told is not None:
            goal.told(len(self.indices) / goal.budget)
        reached = goal.cost is not None and bool(self.indices) and self.cost <= goal.cost
        return reached or len(self.indices) >= goal.budget


# -- the compiled kernel -----------------------------------------------------------------------------------------------


_WIDEST = 512
_ROUND = 64
_GUESSES = 64
_WORTH_A_GUESS = 256


class FusedNearest(Nearest):
    """On the CPU, by `thinwire.kernels.nearest`; large pieces of work are shared out to threads that end with it.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        library: the compiled kernel.
        threads: how many at most.
    """

    def __init__(self, rows: Tensor, library: CDLL, *, threads: int = 1) -> None:
        self.n, self._features = rows.shape
        self._library = library
        self._lanes, self._together = int(library.thinwire_lanes()), int(library.thinwire_together())
        self._threads = min(threads, int(library.thinwire_most_threads()))
        self._panels = _panels(rows, self._lanes)
        self._near = torch.zeros(len(self._panels) * self._lanes)
        self._near[: self.n] = 1
        self._who = torch.zeros(len(self._near), dtype=torch.int32)
        self._facility = self._facility_of(self._near, self._who)

    def _facility_of(self, near: Tensor, who: Tensor) -> nearest.Facility:
        """The points, as near to their representatives as that."""
        return nearest.Facility(
            points=self._panels.data_ptr(),
            near=near.data_ptr(),
            nearest=who.data_ptr(),
            panels=len(self._panels),
            features=self._features,
            threads=self._threads,
        )

    def of(self, points: Tensor) -> Tensor:
        """The coordinates of some of the points."""
        # By numpy, as torch would start its threads for so few numbers.
        places = points.numpy()
        return torch.from_numpy(self._panels.numpy()[places // self._lanes, :, places % self._lanes])

    def gains(self, rows: Tensor) -> Gains:
        """What candidates would save."""
        return self._gains(rows, None)[0]

    def _gains(self, rows: Tensor, later: Tensor | None) -> Gains:
        """What candidates would save now, and what they would if the points were as near as `later`; [1 or 2, m]."""
        count = -(-len(rows) // self._together) * self._together
        candidates = rows.new_zeros((count, self._features))
        candidates[: len(rows)] = rows
        times = 1 if later is None else 2
        sums = np.empty((times * self._threads, count))
        nearer = None if later is None else later.data_ptr()
        given = nearer, candidates.data_ptr(), count, sums.ctypes.data
        used = self._library.thinwire_gains(byref(self._facility), *given)
        return sums[: times * used].reshape(times, used, count).sum(1)[:, : len(rows)]

    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make coordinates a representative."""
        row = row.contiguous()
        self._library.thinwire_take(byref(self._facility), row.data_ptr(), position)
        if own is not None:
            self._near[own], self._who[own] = 0, position

    def lazy(self, candidates: Numbers, picks: Picks, goal: Goal) -> None:
        """Go on choosing by lazy greedy until the goal is reached.

        Args:
            candidates: int64, [m]; those not chosen yet.
            picks: what has been chosen; grows.
            goal: when to stop.
        """
        candidates, bounds = self._bounds(candidates, picks)
        # Sorted, and therefore a heap.
        heap = candidates[np.lexsort((candidates, -bounds))]
        known = np.full(self.n, -1.0)
        known[candidates] = bounds
        rows, sums = np.empty((_WIDEST, self._features), np.float32), np.empty((self._threads, _WIDEST))
        asked, picked, gains = np.empty_like(heap), np.empty(_ROUND, np.int64), np.empty(_ROUND)
        search = nearest.Search(
            ids=heap.ctypes.data,
            asked=asked.ctypes.data,
            picked=picked.ctypes.data,
            bounds=known.ctypes.data,
            sums=sums.ctypes.data,
            gains=gains.ctypes.data,
            rows=rows.ctypes.data,
            size=len(heap),
            block=self._together,
            widest=_WIDEST,
            cost=picks.cost,
            enough=-1.0 if goal.cost is None else goal.cost,
        )
        while not picks.done(goal) and search.size:
            search.position = len(picks.indices)
            search.picks = min(_ROUND, goal.budget - len(picks.indices))
            count = self._library.thinwire_lazy(byref(self._facility), byref(search))
            picks.indices += picked[:count].tolist()
            picks.gains += gains[:count].tolist()
            picks.cost = float(search.cost)

    def _bounds(self, candidates: Numbers, picks: Picks) -> tuple[Numbers, Gains]:
        """Candidates left, and what each would save; the first pick is made here where it was guessed.

        After the first pick all gains have shrunk so much that each would be asked for again. Who will be first is
        easily guessed, and then one pass over all distances gives the gains before it and after it.
        """
        guess = None if picks.indices or len(candidates) < _WORTH_A_GUESS else self._guess(candidates)
        later = None if guess is None else self._from(self.of(torch.tensor([guess]))[0])
        found = np.concatenate(
            [self._gains(self.of(part), later) for part in torch.from_numpy(candidates).split(1024)], axis=1
        )
        first = int(found[0].argmax())
        if guess is None or candidates[first] != guess:
            return candidates, found[0]
        self.take(self.of(torch.tensor([guess]))[0], 0, guess)
        picks.add(guess, float(found[0, first]))
        return np.delete(candidates, first), np.delete(found[1], first)

    def _guess(self, candidates: Numbers) -> int:
        """The best of those that are nearest to the mean."""
        mean = self._panels.sum((0, 2), dtype=torch.float64) / self.n
        middle = np.sort(candidates[np.argsort(self._from(mean.float()).numpy()[candidates], kind="stable")[:_GUESSES]])
        return int(middle[self.gains(self.of(torch.from_numpy(middle))).argmax()])

    def _from(self, row: Tensor) -> Tensor:
        """How near the points would be with these coordinates as their first representative."""
        near, who, row = self._near.clone(), self._who.clone(), row.contiguous()
        self._library.thinwire_take(byref(self._facility_of(near, who)), row.data_ptr(), 0)
        return near

    def cost(self) -> float:
        """The sum of the distances to the nearest representatives."""
        return float(self._near.sum(dtype=torch.float64))

    def representatives(self) -> Tensor:
        """The position of the nearest representative of each point."""
        return self._who[: self.n].long()


def nearest_of(rows: Tensor, *, threads: int = 1) -> tuple[Nearest, int]:
    """The fastest way there is for these rows, and how many candidates it likes to be asked for at a time."""
    library = nearest.compiled(rows)
    if library is None or len(rows) == 0:
        return TorchNearest(rows), 64
    return FusedNearest(rows, library, threads=threads), int(library.thinwire_together())


def fused(facility: Facility) -> FusedNearest | None:
    """The compiled part of a facility whose candidates are its points; None where it has none."""
    found = facility.nearest if isinstance(facility, CoordinateFacility) else None
    return found if isinstance(found, FusedNearest) else None


def _panels(rows: Tensor, lanes: int) -> Tensor:
    """[n, d] as [panels, d, lanes], filled up with zeros."""
    count = -(-len(rows) // lanes)
    filled = rows.new_zeros((count, rows.shape[1], lanes))
    whole = len(rows) // lanes
    filled[:whole] = rows[: whole * lanes].view(whole, lanes, rows.shape[1]).transpose(1, 2)
    if whole < count:
        filled[whole, :, : len(rows) - whole * lanes] = rows[whole * lanes :].T
    return filled
