"""Greedy in parts, then among what the parts picked.

Mirzasoleiman et al., Distributed Submodular Maximization, NeurIPS 2013 (GreeDi); with random parts the expectation is
at least (1-1/e)/2 of the optimum: Barbosa et al., The Power of Randomization, ICML 2015.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from thinwire.coreset.facility import CoordinateFacility, DistanceFacility, Facility, Numbers
from thinwire.coreset.fused import nearest_of
from thinwire.coreset.goals import Goal, Picks
from thinwire.coreset.greedy import lazy, replayed
from thinwire.coreset.similarity import Distances, among


def picked_in_parts(points: Tensor | Distances, goal: Goal, parts: int, generator: torch.Generator) -> list[Numbers]:
    """The picks of lazy greedy in each of some random parts, in numbers of all points.

    Args:
        points: coordinates in units, or distances.
        goal: its budget is that of each part; a part as small as it is taken whole.
        parts: how many.
        generator: draws the parts.
    """
    n = len(points) if isinstance(points, Tensor) else points.n
    order = torch.randperm(n, generator=generator)
    return [picked(points, members.sort().values, goal) for members in order.tensor_split(min(parts, n))]


def picked(points: Tensor | Distances, members: Tensor, goal: Goal) -> Numbers:
    """The picks of lazy greedy among some of the points, in numbers of all."""
    if len(members) <= goal.budget:
        return members.numpy()
    if isinstance(points, Tensor):
        nearest, block = nearest_of(points[members.to(points.device)])
        facility: Facility = CoordinateFacility(nearest, 1.0, block=block)
    else:
        facility = DistanceFacility(among(points, members))
    own = lazy(facility, replace(goal, cost=None, told=None)).indices
    return members.numpy()[own]


def best_of_parts(make: Callable[[], Facility], goal: Goal, parts: list[Numbers]) -> tuple[Facility, Picks]:
    """Lazy greedy among all parts' picks, or one part's own picks where those are better.

    Args:
        make: a facility of all points where nothing is chosen yet.
        goal: when to stop.
        parts: what was picked in each.
    """
    union = np.sort(np.concatenate(parts))
    facility = make()
    best = (facility, lazy(facility, goal, candidates=union))
    for part in parts:
        facility = make()
        picks = replayed(facility, part.tolist(), goal)
        if picks.cost < best[1].cost and len(picks.indices) <= len(best[1].indices):
            best = (facility, picks)
    return best
