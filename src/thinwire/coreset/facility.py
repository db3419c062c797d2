# SPDX-License-Identifier: Apache-2.0
r"""Facility location: the gain of one more representative, and the nearest representative of each point.

$F(S)=\sum_i\max(0, d_0-\min_{j\in S}d_{ij})$ with $d_0$ above all distances; the gain of a candidate $e$ is
$\sum_i\max(0, m_i-d_{ie})$ with $m_i$ the distance of point i to its nearest representative so far.

Distances are measured in units of $d_0$, a power of two, and rounded to multiples of $2^{-23}$ of it. Sums of such
numbers in float64 are exact, and therefore the same in any order: a gain does not depend on the block of the candidate,
nor on the thread or rank that holds a point, and equal gains are equal bits.
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

from thinwire.core.kernels import nearest
from thinwire.core.kernels.base import as_fp32
from thinwire.coreset.similarity import Distances, distances_to, power_above, to_rows
from thinwire.errors import ConfigError

Gains: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = NDArray[np.int64]
_BLOCK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}


class Nearest(ABC):
    """The nearest representative of each of some points.

    Attributes:
        n: how many points.
        block: candidates for which `gains` is most efficient.
    """

    n: int
    block: int = 64

    @abstractmethod
    def of(self, points: Tensor) -> Tensor:
        """The rows of some of the points: coordinates, float32 [m, d], or for bare distances their numbers, [m]."""

    @abstractmethod
    def gains(self, rows: Tensor) -> Gains:
        """The gains of candidates with these rows."""

    @abstractmethod
    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make a row a representative; `own` is the point that has it, if it is on this rank."""

    @abstractmethod
    def representatives(self) -> Tensor:
        """The position of the nearest representative of each point, int64 [n]; the earlier one of two as near."""


class TorchNearest(Nearest):
    """On any device, by matrix products in float64, or by given distances.

    Args:
        points: float32, [n, d], no two further apart than 1; or distances between them.
    """

    def __init__(self, points: Tensor | Distances) -> None:
        self._points = points
        if isinstance(points, Tensor):
            self.n, self._device = len(points), points.device
        else:
            self.n, self._device, self._unit = points.n, _first_distances(points).device, unit_of(points)
        self._width = width_of(points, self._device)
        self._near = torch.ones(self.n, dtype=torch.float32, device=self._device)
        self._positions = torch.zeros(self.n, dtype=torch.int64, device=self._device)

    def of(self, points: Tensor) -> Tensor:
        """Return the rows of some of the points."""
        return self._points[points.to(self._device)] if isinstance(self._points, Tensor) else points

    def gains(self, rows: Tensor) -> Gains:
        """Return the gains of candidates."""
        found: list[Gains] = []
        for part in rows.split(self._width):
            saved = torch.sub(self._near[:, None], rounded(self._to(part))).clamp_min_(0)
            found.append(saved.sum(0, dtype=torch.float64).cpu().numpy())
        return np.concatenate(found)

    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make a row a representative."""
        found = rounded(self._to(row[None])[:, 0])
        if own is not None:
            found[own] = 0
        closer = found < self._near
        self._near[closer] = found[closer]
        self._positions[closer] = position
        # A representative represents itself, even where an equal point was chosen before.
        if own is not None:
            self._positions[own] = position

    def representatives(self) -> Tensor:
        """Return the position of the nearest representative of each point."""
        return self._positions.cpu()

    def _to(self, rows: Tensor) -> Tensor:
        if isinstance(self._points, Tensor):
            return to_rows(self._points, rows)
        return (distances_to(self._points, rows) / self._unit).float()


class Facility:
    """The points, as the greedy methods use them.

    Args:
        nearest: of all the points, which are numbered from 0.

    Attributes:
        block: candidates for which `gains` is most efficient.
        compiled: the kernel that can make all choices by itself; None without one.
    """

    compiled: FusedNearest | None = None

    def __init__(self, nearest: Nearest) -> None:
        self.n, self.block, self._nearest = nearest.n, nearest.block, nearest
        self.compiled = nearest if isinstance(nearest, FusedNearest) else None

    def gains(self, candidates: Numbers) -> Gains:
        """Return the gain of each candidate now, [m]."""
        parts = torch.from_numpy(candidates).split(1024)
        return np.concatenate([self._nearest.gains(self._nearest.of(part)) for part in parts])

    def take(self, candidate: int, position: int) -> None:
        """Make the candidate the representative with this position."""
        own = torch.tensor([candidate], dtype=torch.int64, device="cpu")
        self._nearest.take(self._nearest.of(own)[0], position, candidate)

    def sizes(self, count: int) -> Tensor:
        """Return the number of points that each of `count` representatives represents, int64 [count]."""
        return torch.bincount(self._nearest.representatives(), minlength=count)


def rounded(distances: Tensor) -> Tensor:
    """Distances of at most 1 as multiples of 2^-23, in place."""
    return distances.add_(1).sub_(1).clamp_max_(1)


def width_of(points: Tensor | Distances, device: torch.device) -> int:
    """Candidates whose distances to all points are computed at a time."""
    n = len(points) if isinstance(points, Tensor) else points.n
    width = max(1, _BLOCK_ELEMENTS.get(device.type, 1 << 22) // max(n, 1))
    return width if isinstance(points, Tensor) else min(64, width)


def unit_of(points: Tensor | Distances) -> float:
    """Return a power of two that no distance exceeds: between rows, float32 [n, d], or of given distances."""
    if isinstance(points, Tensor):
        return power_above(2 * norm_of(points))
    # By the triangle inequality no distance exceeds the sum of the two points' distances to the first.
    return power_above(2 * float(_first_distances(points).max()))


def norm_of(points: Tensor) -> float:
    """Return the greatest length of a row; 0 where there is none."""
    lengths = [
        float(torch.linalg.vector_norm(part.double(), dim=1).max()) for part in points.split(1 << 16) if len(part)
    ]
    return max(lengths, default=0.0)


def _first_distances(distances: Distances) -> Tensor:
    return distances_to(distances, torch.tensor([0], dtype=torch.int64, device="cpu"))


# -- goals and picks ---------------------------------------------------------------------------------------------------


Progress: TypeAlias = Callable[[float], None]


@dataclass(frozen=True)
class Goal:
    """When to stop.

    Args:
        budget: the most representatives.
        cost: stop as soon as the cost is not above this, in units of the facility; None for the budget alone.
        on_progress: called with the share that is done.
    """

    budget: int
    cost: float | None = None
    on_progress: Progress | None = None


@dataclass
class Picks:
    """The candidates chosen so far, in order; gains and cost in units of the facility."""

    cost: float
    indices: list[int] = field(default_factory=list[int])
    gains: list[float] = field(default_factory=list[float])

    def take(self, facility: Facility, candidate: int, gain: float) -> None:
        """Choose one more."""
        facility.take(candidate, len(self.indices))
        self.add(candidate, gain)

    def add(self, candidate: int, gain: float) -> None:
        """Record one more that has been chosen."""
        self.indices.append(candidate)
        self.gains.append(gain)
        self.cost -= gain

    def done(self, goal: Goal) -> bool:
        """Return True if the goal is reached; never before the first pick."""
        if goal.on_progress is not None:
            goal.on_progress(len(self.indices) / goal.budget)
        reached = goal.cost is not None and bool(self.indices) and self.cost <= goal.cost
        return reached or len(self.indices) >= goal.budget


# -- the compiled kernel -----------------------------------------------------------------------------------------------


# The kernel never stores a distance for longer than it takes to use it.
_WIDEST = 512  # candidates of one pass at most
_ROUND = 64  # picks between two calls of `on_progress`
_GUESSES = 64  # points near the mean among which the first pick is guessed
_WORTH_A_GUESS = 256  # candidates from which the guess saves more than it costs


class FusedNearest(Nearest):
    """On the CPU, by the kernel `thinwire.core.kernels.nearest`; large calls use threads that end with the call.

    Args:
        rows: float32, [n, d]; no two are further apart than 1.
        library: the compiled kernel.
        threads: at most.
    """

    def __init__(self, rows: Tensor, library: CDLL, *, threads: int = 1) -> None:
        if rows.dtype != torch.float32:
            raise ConfigError(f"points have dtype {rows.dtype}: the compiled kernel reads float32. Convert them first.")
        self.n, self._features = rows.shape
        self._library = library
        self._lanes, self.block = int(library.thinwire_lanes()), int(library.thinwire_together())
        self._threads = min(threads, int(library.thinwire_most_threads()))
        self._panels = _panels(rows, self._lanes)
        self._near = torch.zeros(len(self._panels) * self._lanes, dtype=torch.float32, device="cpu")
        # Padding is at distance 0 from its representative, so that no candidate gains by it.
        self._near[: self.n] = 1
        self._positions = torch.zeros(len(self._near), dtype=torch.int32, device="cpu")
        self._facility = self._facility_of(self._near, self._positions)

    def _facility_of(self, near: Tensor, position_of: Tensor) -> nearest.Facility:
        """Return the kernel's view of the points, with these distances to their representatives."""
        return nearest.Facility(
            points=self._panels.data_ptr(),
            near=near.data_ptr(),
            nearest=position_of.data_ptr(),
            panels=len(self._panels),
            features=self._features,
            threads=self._threads,
        )

    def of(self, points: Tensor) -> Tensor:
        """Return the coordinates of some of the points."""
        # By NumPy: torch would start its threads even for so few numbers.
        places = points.numpy()
        return torch.from_numpy(self._panels.numpy()[places // self._lanes, :, places % self._lanes])

    def gains(self, rows: Tensor) -> Gains:
        """Return the gains of candidates."""
        return self._gains(rows, None)[0]

    def _gains(self, rows: Tensor, later: Tensor | None) -> Gains:
        """Return the gains of candidates now, and those for the least distances `later`; [1 or 2, m]."""
        count = -(-len(rows) // self.block) * self.block
        candidates = torch.zeros((count, self._features), dtype=torch.float32, device="cpu")
        candidates[: len(rows)] = rows
        # The kernel writes one partial sum for each thread; exact sums may be added in any order.
        times = 1 if later is None else 2
        sums = np.empty((times * self._threads, count))
        nearer = None if later is None else later.data_ptr()
        given = nearer, candidates.data_ptr(), count, sums.ctypes.data
        used = self._library.thinwire_gains(byref(self._facility), *given)
        return sums[: times * used].reshape(times, used, count).sum(1)[:, : len(rows)]

    def take(self, row: Tensor, position: int, own: int | None) -> None:
        """Make coordinates a representative."""
        row = as_fp32(row)
        self._library.thinwire_take(byref(self._facility), row.data_ptr(), position)
        if own is not None:
            self._near[own], self._positions[own] = 0, position

    def lazy(self, candidates: Numbers, picks: Picks, goal: Goal) -> None:
        """Continue lazy greedy until the goal is reached.

        Args:
            candidates: int64, [m]; those not chosen yet.
            picks: those chosen so far; extended in place.
            goal: when to stop.
        """
        candidates, bounds = self._bounds(candidates, picks)
        # A sorted array is a heap.
        heap = candidates[np.lexsort((candidates, -bounds))]
        known = np.full(self.n, -1.0)
        known[candidates] = bounds
        rows, sums = np.empty((_WIDEST, self._features), np.float32), np.empty((self._threads, _WIDEST))
        asked, picked, gains = np.empty_like(heap), np.empty(_ROUND, np.int64), np.empty(_ROUND)
        # The struct holds addresses only: these arrays must stay referenced until the last call.
        search = nearest.Search(
            ids=heap.ctypes.data,
            asked=asked.ctypes.data,
            picked=picked.ctypes.data,
            bounds=known.ctypes.data,
            sums=sums.ctypes.data,
            gains=gains.ctypes.data,
            rows=rows.ctypes.data,
            size=len(heap),
            block=self.block,
            widest=_WIDEST,
            cost=picks.cost,
            enough=-1.0 if goal.cost is None else goal.cost,
        )
        # In rounds, so that progress is reported and the result arrays stay small.
        while not picks.done(goal) and search.size:
            search.position = len(picks.indices)
            search.picks = min(_ROUND, goal.budget - len(picks.indices))
            count = self._library.thinwire_lazy(byref(self._facility), byref(search))
            picks.indices += picked[:count].tolist()
            picks.gains += gains[:count].tolist()
            picks.cost = float(search.cost)

    def _bounds(self, candidates: Numbers, picks: Picks) -> tuple[Numbers, Gains]:
        """Return the remaining candidates and their gains; the first pick is made here if it was guessed.

        The first pick lowers all gains so much that each would have to be computed again. It is easily guessed, and one
        pass over all distances then gives the gains before and after it.
        """
        guess = None if len(candidates) < _WORTH_A_GUESS else self._guess(candidates)
        later = None if guess is None else self._distances_after(self._row_of(guess))
        found = np.concatenate(
            [self._gains(self.of(part), later) for part in torch.from_numpy(candidates).split(1024)], axis=1
        )
        first = int(found[0].argmax())
        if guess is None or candidates[first] != guess:
            return candidates, found[0]
        self.take(self._row_of(guess), 0, guess)
        picks.add(guess, float(found[0, first]))
        return np.delete(candidates, first), np.delete(found[1], first)

    def _guess(self, candidates: Numbers) -> int:
        """Return the best of the candidates nearest to the mean."""
        mean = self._panels.sum((0, 2), dtype=torch.float64) / self.n
        middle = np.sort(
            candidates[np.argsort(self._distances_after(mean.float()).numpy()[candidates], kind="stable")[:_GUESSES]]
        )
        return int(middle[self.gains(self.of(torch.from_numpy(middle))).argmax()])

    def _row_of(self, point: int) -> Tensor:
        return self.of(torch.tensor([point], dtype=torch.int64, device="cpu"))[0]

    def _distances_after(self, row: Tensor) -> Tensor:
        """Return the least distances of the points if these coordinates were their first representative."""
        near, position_of, row = self._near.clone(), self._positions.clone(), as_fp32(row)
        self._library.thinwire_take(byref(self._facility_of(near, position_of)), row.data_ptr(), 0)
        return near

    def representatives(self) -> Tensor:
        """Return the position of the nearest representative of each point."""
        return self._positions[: self.n].long()


def nearest_for(points: Tensor | Distances, *, threads: int = 1) -> Nearest:
    """Return the fastest kind for these points."""
    library = nearest.compiled(points) if isinstance(points, Tensor) and len(points) else None
    if library is None or not isinstance(points, Tensor):
        return TorchNearest(points)
    return FusedNearest(points, library, threads=threads)


def _panels(rows: Tensor, lanes: int) -> Tensor:
    """Rows [n, d] in the kernel's layout [panels, d, lanes], padded with zeros."""
    count = -(-len(rows) // lanes)
    filled = rows.new_zeros((count, rows.shape[1], lanes))
    whole = len(rows) // lanes
    filled[:whole] = rows[: whole * lanes].view(whole, lanes, rows.shape[1]).transpose(1, 2)
    if whole < count:
        filled[whole, :, : len(rows) - whole * lanes] = rows[whole * lanes :].T
    return filled
