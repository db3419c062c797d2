"""By which of two ways members add up their gradients, and which of them is the faster."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Literal

Plane = Literal["auto", "zeros", "ring"]
_TRIED = 6  # exchanges of either kind before one is chosen; the first of each is not counted
_FORGIVEN = 2  # all-reduces that were given up, before no other is chosen


@dataclass
class Planes:
    """Which way the next exchange goes.

    Args:
        plane: "zeros" is an all-reduce among all ranks, to which late ones add zeros; "ring" are messages among
            members; "auto" tries both in turn and stays with the one whose median was lower, unless all-reduces are
            held up time and again.
        summed: seconds that all-reduces took.
        lettered: seconds that exchanges by messages took.
        given_up: all-reduces that somebody held up.
    """

    plane: Plane = "ring"
    summed: list[float] = field(default_factory=list[float])
    lettered: list[float] = field(default_factory=list[float])
    given_up: int = 0

    def note(self, seconds: float, *, summed: bool) -> None:
        """An exchange has taken so long, from its announcement until all members held the mean."""
        tried = self.summed if summed else self.lettered
        if len(tried) < _TRIED:
            tried.append(seconds)

    @property
    def sums(self) -> bool:
        """Whether the next exchange is to be an all-reduce."""
        if self.plane != "auto":
            return self.plane == "zeros"
        if self.given_up > _FORGIVEN:
            return False
        if min(len(self.summed), len(self.lettered)) < _TRIED:
            return len(self.summed) <= len(self.lettered)
        return median(self.summed[1:]) < median(self.lettered[1:])
