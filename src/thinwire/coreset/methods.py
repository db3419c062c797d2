# SPDX-License-Identifier: Apache-2.0
"""Selection among the points of one class, or all points, by any of the methods."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from thinwire.core.validation import check_number, check_ranges
from thinwire.coreset.facility import Facility, Goal, Picks, nearest_for, unit_of
from thinwire.coreset.greedy import lazy, naive
from thinwire.coreset.similarity import Distances
from thinwire.coreset.sparse import sparse
from thinwire.errors import ConfigError

Method: TypeAlias = Literal["lazy", "naive", "sparse"]


@dataclass(frozen=True)
class MethodSettings:
    """A method with its settings; see `select`.

    Raises:
        ConfigError: a setting is out of range.
    """

    method: Method
    seed: int
    neighbours: int

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ConfigError(f"method={self.method!r}: must be one of {', '.join(get_args(Method))}")
        for name in ("seed", "neighbours"):
            check_number(name, getattr(self, name), whole=True)
        if abs(self.seed) >= 2**32:
            raise ConfigError(f"seed={self.seed}: must be less than {2**32}. 0 is usual")
        check_ranges(self, neighbours=("1..", "32 is usual, more is nearer to exact"))

    def generator(self, group: int) -> torch.Generator:
        """Return the random generator of one class."""
        # A generator for each class: classes may be selected in parallel.
        return torch.Generator().manual_seed(int(self.seed) * 1_000_003 + group)


@dataclass(frozen=True)
class ClassSelection:
    """Picks, the gain of each, the number of points that each represents, and the cost; in distances."""

    indices: list[int]
    gains: list[float]
    sizes: Tensor
    cost: float


def solve(
    points: Tensor | Distances, goal: Goal, settings: MethodSettings, generator: torch.Generator, threads: int
) -> ClassSelection:
    """Select among points that are all on this rank.

    Args:
        points: float32 coordinates, [n, d], or distances.
        goal: when to stop, its cost in distances.
        settings: of the method.
        generator: for `sparse`.
        threads: at most.

    Raises:
        ConfigError: the method needs coordinates.
    """
    unit = unit_of(points)
    rows = points / unit if isinstance(points, Tensor) else points
    inner = replace(goal, cost=None if goal.cost is None else goal.cost / unit)
    if settings.method == "sparse":
        if not isinstance(rows, Tensor):
            raise ConfigError("method='sparse': needs features. For distances use lazy")
        picks, sizes = sparse(rows, inner, neighbours=settings.neighbours, generator=generator)
    else:
        picks, sizes = greedy(Facility(nearest_for(rows, threads=threads)), inner, settings.method)
    return in_distances(picks, sizes, unit)


def greedy(facility: Facility, goal: Goal, method: Method) -> tuple[Picks, Tensor]:
    """Select by `naive` or `lazy`, which only need a facility without representatives; the goal is in its unit."""
    picks = (naive if method == "naive" else lazy)(facility, goal)
    return picks, facility.sizes(len(picks.indices))


def in_distances(picks: Picks, sizes: Tensor, unit: float) -> ClassSelection:
    """Convert picks from units to distances."""
    return ClassSelection(picks.indices, [gain * unit for gain in picks.gains], sizes, picks.cost * unit)
