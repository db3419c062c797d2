"""When a selection is over, and what it has chosen so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from thinwire.coreset.facility import Facility

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
