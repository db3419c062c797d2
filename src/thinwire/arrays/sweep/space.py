# SPDX-License-Identifier: Apache-2.0
"""The search space of a sweep: a range or a list of values for each hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from thinwire.errors import ConfigError

Value: TypeAlias = float | int | str
Hyperparameters: TypeAlias = Mapping[str, Value]
_EXAMPLE = "write it like log:1e-4:1e-1, 0:0.95, whole:8:64 or 16,32,64"


@dataclass(frozen=True)
class Range:
    """An interval of numbers, ends included.

    Args:
        low: smallest value.
        high: largest value, above `low`.
        scale: the distribution of draws: "linear" is uniform, "log" uniform in the logarithm, "whole" uniform over
            whole numbers.

    Raises:
        ConfigError: the ends are in the wrong order, infinite, or not positive under "log".
    """

    low: float
    high: float
    scale: Literal["linear", "log", "whole"] = "linear"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"range {self}: its ends must be finite and rise; {_EXAMPLE}")
        if self.scale == "log" and self.low <= 0:
            raise ConfigError(f"range {self}: a logarithmic range begins above 0. Use 1e-6, or a linear one")
        if self.scale == "whole" and (self.low != int(self.low) or self.high != int(self.high)):
            raise ConfigError(f"range {self}: its ends must be whole numbers, such as whole:8:64")

    def __str__(self) -> str:
        """Return the text that `parse_domain` reads."""
        return f"{self.scale}:{self.low:g}:{self.high:g}"

    def at(self, fraction: float) -> Value:
        """Return the number at a fraction in [0, 1) of the range."""
        if self.scale == "whole":
            return int(self.low + math.floor(fraction * (self.high - self.low + 1)))
        if self.scale == "log":
            return self.low * (self.high / self.low) ** fraction
        return self.low + (self.high - self.low) * fraction


@dataclass(frozen=True)
class Choices:
    """A list of values.

    Args:
        values: at least one value, all different.

    Raises:
        ConfigError: the list is empty, or has a value twice.
    """

    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError(f"no values to choose from; {_EXAMPLE}")
        if len(set(self.values)) < len(self.values):
            raise ConfigError(f"values {self}: one is listed twice. Leave it out")

    def __str__(self) -> str:
        """Return the text that `parse_domain` reads."""
        return ",".join(str(value) for value in self.values)

    def at(self, fraction: float) -> Value:
        """Return the value at a fraction in [0, 1) of the list."""
        return self.values[int(fraction * len(self.values))]


Domain: TypeAlias = Range | Choices


@dataclass(frozen=True)
class Space:
    """The hyperparameters that a sweep searches, with their possible values.

    Args:
        domains: a range or a list of values for each hyperparameter, by name.
    """

    domains: Mapping[str, Domain]

    def extremes(self) -> list[dict[str, Value]]:
        """Return every value of every list and both ends of every range, each as the only hyperparameter of a trial."""
        found = list[dict[str, Value]]()
        for name, domain in self.domains.items():
            values = domain.values if isinstance(domain, Choices) else (domain.low, domain.high)
            found += [{name: value} for value in values]
        return found

    def draw(self, seed: int, number: int) -> dict[str, Value]:
        """Return the hyperparameters of trial `number`, a function of the seed and the number only."""
        rng = np.random.default_rng(np.random.SeedSequence((seed, number)))
        # Sorted, so that draws do not depend on the order in which hyperparameters were given.
        return {name: self.domains[name].at(float(rng.random())) for name in sorted(self.domains)}


def parse_domain(text: str) -> Domain:
    """Return a range or a list of values, as in "log:1e-4:1e-1", "0:0.95", "whole:8:64", "16,32,64" or "0.1".

    Raises:
        ConfigError: it is neither.
    """
    scale, *ends = text.split(":")
    if not ends:
        return Choices(tuple(_value(word.strip()) for word in text.split(",")))
    if len(ends) == 1:
        scale, ends = "linear", [scale, *ends]
    if scale not in ("linear", "log", "whole") or len(ends) != 2:
        raise ConfigError(f"{text!r}: is not a range; {_EXAMPLE}")
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        raise ConfigError(f"{text!r}: the ends of a range are numbers; {_EXAMPLE}") from None
    return Range(low, high, scale)  # pyright: ignore[reportArgumentType]


def _value(word: str) -> Value:
    if not word:
        raise ConfigError(f"an empty value; {_EXAMPLE}")
    for kind in (int, float):  # int first, so that 16 stays a whole number
        try:
            return kind(word)
        except ValueError:
            continue
    return word
