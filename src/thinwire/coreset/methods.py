"""One class, or all points, by any of the methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from thinwire.coreset.facility import CoordinateFacility, DistanceFacility, Facility, Goal, Numbers, Picks, nearest_of
from thinwire.coreset.greedy import best_of_parts, lazy, naive, nothing, picked_in_parts, stochastic
from thinwire.coreset.similarity import Distances, power_above
from thinwire.coreset.sparse import sparse
from thinwire.coreset.streaming import streaming
from thinwire.errors import ConfigError

Method: TypeAlias = Literal["lazy", "naive", "stochastic", "sparse", "streaming", "greedi"]
EXACT = ("lazy", "naive")


@dataclass(frozen=True)
class How:
    """A method with its settings; see `select`.

    Raises:
        ConfigError: a setting is out of range.
    """

    method: Method
    seed: int
    eps: float
    neighbours: int
    parts: int

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"method={self.method!r}: must be one of {', '.join(get_args(Method))}")
        if not 0 < self.eps < 1:
            raise ConfigError(f"eps={self.eps}: must lie between 0 and 1; 0.01 is usual, 0.9 hardly beats random")
        if self.neighbours < 1:
            raise ConfigError(f"neighbours={self.neighbours}: must be at least 1; 32 is usual, more is nearer to exact")
        if self.parts < 1:
            raise ConfigError(f"parts={self.parts}: must be at least 1; 4 is usual, more is faster and further off")

    def generator(self, group: int) -> torch.Generator:
        """The draws of one class."""
        return torch.Generator().manual_seed(self.seed * 1_000_003 + group)


@dataclass(frozen=True)
class Warm:
    """The picks of an earlier selection of the same points, and what each gained, in distances."""

    indices: list[int]
    gains: list[float]


@dataclass(frozen=True)
class Found:
    """Picks, what each gained, how many points each speaks for, and the cost; in distances."""

    indices: list[int]
    gains: list[float]
    sizes: Tensor
    cost: float


def solve(
    points: Tensor | Distances, goal: Goal, how: How, draws: torch.Generator, warm: Warm | None, threads: int
) -> Found:
    """Select among these points, all of them here.

    Args:
        points: float32 coordinates, [n, d], or distances.
        goal: when to stop, its cost in distances.
        how: the method.
        draws: for the methods that draw.
        warm: an earlier selection.
        threads: that share the work.

    Raises:
        ConfigError: the method needs coordinates.
    """
    if isinstance(points, Tensor):
        unit = unit_of(points)
        rows = points / unit
    elif how.method in ("sparse", "streaming"):
        raise ConfigError(f"method={how.method!r}: needs features; of distances alone lazy or stochastic can select")
    else:
        rows, unit = points, DistanceFacility(points).unit
    inner = replace(goal, cost=None if goal.cost is None else goal.cost / unit)

    def make() -> Facility:
        return facility_of(rows, unit, threads)

    if how.method in ("sparse", "streaming") and isinstance(rows, Tensor):
        picks, sizes = _approximate(rows, inner, how, draws, make)
    else:
        parts = picked_in_parts(rows, inner, how.parts, draws) if how.method == "greedi" else []
        picks, sizes = greedy(make, inner, how, draws, warm, parts)
    return found(picks, sizes, unit)


def greedy(
    make: Callable[[], Facility], goal: Goal, how: How, draws: torch.Generator, warm: Warm | None, parts: list[Numbers]
) -> tuple[Picks, Tensor]:
    """By the methods that see the points through a facility alone; goal in its unit.

    Args:
        make: a facility where nothing is chosen yet.
        goal: when to stop.
        how: the method.
        draws: for the methods that draw.
        warm: an earlier selection.
        parts: for `greedi`: what was picked in each part.
    """
    facility = make()
    if how.method == "greedi":
        facility, picks = best_of_parts(make, goal, parts)
    elif how.method == "stochastic":
        picks = stochastic(facility, goal, eps=how.eps, generator=draws)
    elif warm is not None:
        facility, picks = resumed(make, goal, warm)
    else:
        picks = naive(facility, goal) if how.method == "naive" else lazy(facility, goal)
    return picks, facility.sizes(len(picks.indices))


def resumed(make: Callable[[], Facility], goal: Goal, warm: Warm) -> tuple[Facility, Picks]:
    """Lazy greedy from where an earlier selection ended, as long as each of its picks gains what it did then.

    Gains are exact, so a gain that is the same to the last bit is taken to say that the distances are the same; at the
    first that is not, the selection begins anew.
    """
    facility = make()
    picks = nothing(facility)
    for candidate, gain in zip(warm.indices, warm.gains, strict=True):
        if picks.done(goal):
            break
        now = float(facility.gains(torch.tensor([candidate]).numpy())[0])
        if now * facility.unit != gain:
            facility = make()
            return facility, lazy(facility, goal)
        picks.take(facility, candidate, now)
    return facility, lazy(facility, goal, picks=picks)


def facility_of(points: Tensor | Distances, unit: float, threads: int) -> Facility:
    """The facility of points that are all here; coordinates are in units already."""
    if not isinstance(points, Tensor):
        return DistanceFacility(points)
    nearest, block = nearest_of(points, threads=threads)
    return CoordinateFacility(nearest, unit, block=block)


def unit_of(points: Tensor) -> float:
    """A power of two that is above all distances between rows, float32 [n, d]."""
    return power_above(2 * norm_of(points))


def norm_of(points: Tensor) -> float:
    """The greatest length of a row; 0 where there is none."""
    lengths = [
        float(torch.linalg.vector_norm(part.double(), dim=1).max()) for part in points.split(1 << 16) if len(part)
    ]
    return max(lengths, default=0.0)


def found(picks: Picks, sizes: Tensor, unit: float) -> Found:
    """Picks from units to distances."""
    return Found(picks.indices, [gain * unit for gain in picks.gains], sizes, picks.cost * unit)


def _approximate(
    rows: Tensor, goal: Goal, how: How, draws: torch.Generator, make: Callable[[], Facility]
) -> tuple[Picks, Tensor]:
    if how.method == "sparse":
        return sparse(rows, goal, neighbours=how.neighbours, generator=draws)
    return streaming(rows, goal, eps=how.eps, generator=draws, make=make)
