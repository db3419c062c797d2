# SPDX-License-Identifier: Apache-2.0
"""The learning rate at which a method ends lowest, found from one that is no method's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reproductions.backup_workers.race import Ran

_FARTHEST = 6  # doublings or halvings from the first rate


@dataclass(frozen=True)
class Tuned:
    """A method at the learning rate that was found for it.

    Attributes:
        rate: the learning rate.
        tried: by learning rate, the loss in the search, which has a seed of its own.
        rans: at that rate, one race for each of the other seeds.
    """

    rate: float
    tried: Mapping[float, float]
    rans: tuple[Ran, ...]

    @property
    def inner(self) -> bool:
        """Whether a lower and a higher rate were tried, and ended higher."""
        return min(self.tried) < self.rate < max(self.tried)


def search_rate(trial: Callable[[float], float], first: float) -> dict[float, float]:
    """Double a learning rate while that helps, or halve it while that does: the best has a worse one on either side.

    Args:
        trial: of a learning rate, the loss that it ends with; infinite where it diverges.
        first: where the search begins.

    Returns:
        By learning rate, the loss of every trial.
    """
    tried = {first: trial(first)}
    for factor in (2.0, 0.5):
        rate = first
        for _ in range(_FARTHEST):
            following = rate * factor
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
