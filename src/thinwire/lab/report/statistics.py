# SPDX-License-Identifier: Apache-2.0
"""Figures over seeds or rounds: their middle, their spread, and ratios of pairs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Spread:
    """A figure over seeds or rounds.

    Args:
        values: at least one.
        runs: how many runs there are, with those that lack the figure; as many as values unless given.

    Example:
        >>> found = Spread((1.0, 2.0, 6.0))
        >>> found.mean, found.median, found.low, found.high
        (3.0, 2.0, 1.0, 6.0)
        >>> found.words(".1f"), found.words(".0f", of="mean", scale=1000)
        ('2.0 (1.0 to 6.0)', '3000 (1000 to 6000)')
    """

    values: tuple[float, ...]
    runs: int = 0

    @property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The least value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The greatest value."""
        return max(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation of the values, not of their mean; 0 for one value."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def error(self) -> float:
        """The standard error of the mean; 0 for one value."""
        return self.deviation / sqrt(len(self.values))

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The quartiles, of at least two values; the one in the middle is the median."""
        low, middle, high = statistics.quantiles(self.values, n=4)
        return low, middle, high

    @property
    def share(self) -> str:
        """Of how many of the seeds the figure is, such as ` (2 of 3 seeds)`; "" if it is of all."""
        return f" ({len(self.values)} of {self.runs} seeds)" if len(self.values) < self.runs else ""

    def words(self, form: str, *, of: str = "median", scale: float = 1.0, unit: str = "") -> str:
        """Write the median, or another property, and the range behind it.

        Args:
            form: of each number, such as ".3f".
            of: the property in front.
            scale: what each number is multiplied by.
            unit: written behind the number in front.
        """
        middle, low, high = (format(scale * each, form) for each in (getattr(self, of), self.low, self.high))
        return f"{middle}{unit} ({low} to {high})"


def spread(values: Iterable[float]) -> Spread:
    """Return the spread of some values."""
    return Spread(tuple(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Return the ratios of pairs, each formed within its round or seed.

    Example:
        >>> ratios([2.0, 6.0], [1.0, 2.0]).values
        (2.0, 3.0)
    """
    return spread(a / b for a, b in zip(over, under, strict=True))


def differences(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return how much greater ours are than theirs, each within its round or seed."""
    return spread(a - b for a, b in zip(ours, theirs, strict=True))
