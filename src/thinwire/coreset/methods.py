# SPDX-License-Identifier: Apache-2.0
"""Selection among the points of one class, or all points, by any of the methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from thinwire.core.validation import check_number, check_ranges
from thinwire.coreset.facility import CoordinateFacility, DistanceFacility, Facility, Goal, Numbers, Picks, nearest_for
from thinwire.coreset.greedy import best_of_parts, lazy, naive, no_picks, pick_in_parts, stochastic
from thinwire.coreset.similarity import Distances, power_above
from thinwire.coreset.sparse import sparse
from thinwire.coreset.streaming import streaming
from thinwire.errors import ConfigError

Method: TypeAlias = Literal["lazy", "naive", "stochastic", "sparse", "streaming", "greedi"]
EXACT = ("lazy", "naive")


@dataclass(frozen=True)
class MethodSettings:
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
        check_number("eps", self.eps)
        for name in ("seed", "neighbours", "parts"):
            check_number(name, getattr(self, name), whole=True)
        if abs(self.seed) >= 2**32:
            raise ConfigError(f"seed={self.seed}: must be less than {2**32}. 0 is usual")
        check_ranges(
            self,
            eps=("(0, 1)", "0.01 is usual, 0.9 hardly beats random"),
            neighbours=("1..", "32 is usual, more is nearer to exact"),
            parts=("1..", "4 is usual, more is faster and further off"),
        )

    def generator(self, group: int) -> torch.Generator:
        """The random generator of one class."""
        # A generator for each class: classes may be selected in parallel.
        return torch.Generator().manual_seed(int(self.seed) * 1_000_003 + group)


@dataclass(frozen=True)
class WarmStart:
    """The picks of an earlier selection of the same points, and the gain of each in distances."""

    indices: list[int]
    gains: list[float]


@dataclass(frozen=True)
class ClassSelection:
    """Picks, the gain of each, the number of points that each represents, and the cost; in distances."""

    indices: list[int]
    gains: list[float]
    sizes: Tensor
    cost: float


def solve(
    points: Tensor | Distances,
    goal: Goal,
    settings: MethodSettings,
    generator: torch.Generator,
    warm: WarmStart | None,
    threads: int,
) -> ClassSelection:
    """Select among points that are all on this rank.

    Args:
        points: float32 coordinates, [n, d], or distances.
        goal: when to stop, its cost in distances.
        settings: of the method.
        generator: for the random methods.
        warm: an earlier selection.
        threads: at most.

    Raises:
        ConfigError: the method needs coordinates.
    """
    if isinstance(points, Tensor):
        unit = unit_of(points)
        rows = points / unit
    elif settings.method in ("sparse", "streaming"):
        raise ConfigError(f"method={settings.method!r}: needs features. For distances use lazy or stochastic")
    else:
        rows, unit = points, DistanceFacility(points).unit
    inner = replace(goal, cost=None if goal.cost is None else goal.cost / unit)

    def make() -> Facility:
        return facility_of(rows, unit, threads)

    if settings.method in ("sparse", "streaming") and isinstance(rows, Tensor):
        if settings.method == "sparse":
            picks, sizes = sparse(rows, inner, neighbours=settings.neighbours, generator=generator)
        else:
            picks, sizes = streaming(rows, inner, eps=settings.eps, generator=generator, make=make)
    else:
        parts = pick_in_parts(rows, inner, settings.parts, generator) if settings.method == "greedi" else []
        picks, sizes = greedy(make, inner, settings, generator, warm, parts)
    return in_distances(picks, sizes, unit)


def greedy(
    make: Callable[[], Facility],
    goal: Goal,
    settings: MethodSettings,
    generator: torch.Generator,
    warm: WarmStart | None,
    parts: list[Numbers],
) -> tuple[Picks, Tensor]:
    """Select by a method that only needs a facility; the goal is in its unit.

    Args:
        make: creates a facility without representatives.
        goal: when to stop.
        settings: of the method.
        generator: for the random methods.
        warm: an earlier selection.
        parts: for `greedi`: the picks of each part.
    """
    facility = make()
    if settings.method == "greedi":
        facility, picks = best_of_parts(make, goal, parts)
    elif settings.method == "stochastic":
        picks = stochastic(facility, goal, eps=settings.eps, generator=generator)
    elif warm is not None:
        facility, picks = resumed(make, goal, warm)
    else:
        picks = naive(facility, goal) if settings.method == "naive" else lazy(facility, goal)
    return picks, facility.sizes(len(picks.indices))


def resumed(make: Callable[[], Facility], goal: Goal, warm: WarmStart) -> tuple[Facility, Picks]:
    """Lazy greedy that continues an earlier selection, as long as each of its picks still has the same gain.

    Gains are exact, so gains that are equal bit for bit are taken as proof of equal distances. At the first that
    differs, the selection starts again.
    """
    facility = make()
    picks = no_picks(facility)
    for candidate, gain in zip(warm.indices, warm.gains, strict=True):
        if picks.done(goal):
            break
        now = float(facility.gains(torch.tensor([candidate], dtype=torch.int64, device="cpu").numpy())[0])
        if now * facility.unit != gain:
            facility = make()
            return facility, lazy(facility, goal)
        picks.take(facility, candidate, now)
    return facility, lazy(facility, goal, picks=picks)


def facility_of(points: Tensor | Distances, unit: float, threads: int) -> Facility:
    """The facility of points that are all on this rank; coordinates are in units already."""
    if not isinstance(points, Tensor):
        return DistanceFacility(points)
    nearest, block = nearest_for(points, threads=threads)
    return CoordinateFacility(nearest, unit, block=block)


def unit_of(points: Tensor) -> float:
    """A power of two that no distance between rows, float32 [n, d], exceeds."""
    return power_above(2 * norm_of(points))


def norm_of(points: Tensor) -> float:
    """The greatest length of a row; 0 where there is none."""
    lengths = [
        float(torch.linalg.vector_norm(part.double(), dim=1).max()) for part in points.split(1 << 16) if len(part)
    ]
    return max(lengths, default=0.0)


def in_distances(picks: Picks, sizes: Tensor, unit: float) -> ClassSelection:
    """Convert picks from units to distances."""
    return ClassSelection(picks.indices, [gain * unit for gain in picks.gains], sizes, picks.cost * unit)
