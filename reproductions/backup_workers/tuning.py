# SPDX-License-Identifier: Apache-2.0
"""The learning rate at which a method ends lowest, found from one that is no method's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

_FARTHEST = 6  # doublings or halvings from the first rate, or from the first below it that does not diverge


@dataclass(frozen=True)
class Tuned:
    """What the search for a method's learning rate found.

    Attributes:
        rate: the learning rate.
        tried: by learning rate, the mean loss in the search, which has seeds of its own.
    """

    rate: float
    tried: Mapping[float, float]

    @property
    def loss(self) -> float:
        """In the search, at the rate that was found."""
        return self.tried[self.rate]

    @property
    def inner(self) -> bool:
        """Whether a lower and a higher rate were tried, and ended higher."""
        return min(self.tried) < self.rate < max(self.tried)


def search_rate(trial: Callable[[float], float], first: float) -> dict[float, float]:
    """Double a learning rate while that helps, or halve it while that does: the best has a worse one on either side.

    Args:
        trial: of a learning rate, the loss that it ends with; infinite where it diverges.
        first: where the search begins. Where it diverges, it is halved until it does not: neighbours that diverge
            as well would tell nothing of which way is better.

    Returns:
        By learning rate, the loss of every trial.
    """
    tried = {first: trial(first)}
    while not isfinite(tried[first]) and len(tried) <= _FARTHEST:
        first *= 0.5
        tried[first] = trial(first)
    for factor in (2.0, 0.5):
        rate = first
        for _ in range(_FARTHEST):
            following = rate * factor
            if following not in tried:
                tried[following] = trial(following)
            if tried[following] >= tried[rate]:
                break
            rate = following
        if rate != first:
            # Lower than the first in this direction, so the other side of the best is known already.
            break
    return tried


def best_of(tried: Mapping[float, float]) -> float:
    """The learning rate with the lowest loss."""
    return min(tried, key=lambda rate: tried[rate])
