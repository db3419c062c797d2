# SPDX-License-Identifier: Apache-2.0
"""Durations that are drawn: constant ones, and those that vary a little or a lot."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from random import Random

from thinwire.errors import ConfigError
from thinwire.planning.quantities import parse_duration

_FORM = re.compile(r"([a-z]+)\(([^()]*)\)")
_DRAWS: dict[str, Callable[[Random, float, float], float]] = {
    "constant": lambda random, first, _: first,
    "uniform": lambda random, first, second: random.uniform(first, second),
    "normal": lambda random, first, second: max(0.0, random.gauss(first, second)),
    "exponential": lambda random, first, _: random.expovariate(1.0) * first,
    "lognormal": lambda random, first, second: first * random.lognormvariate(0.0, second),
    "pareto": lambda random, first, second: first * random.paretovariate(second),
}
_RULE = (
    "write a duration such as 50ms, or uniform(40ms, 60ms), normal(50ms, 5ms), exponential(50ms), lognormal(50ms, 0.3) "
    "or pareto(50ms, 2.5)"
)


@dataclass(frozen=True)
class Duration:
    """A random duration, in seconds.

    Attributes:
        kind: "constant"; "uniform" between two; "normal" of a mean and a standard deviation, not below zero;
            "exponential" of a mean; "lognormal" of a median and the standard deviation of the logarithm; or "pareto",
            heavy-tailed, of the least and the tail's exponent: an exponent up to 2 has no variance, up to 1 no mean.
        first: the first number, in seconds.
        second: the second one, in the unit of its kind.

    Raises:
        ConfigError: there is no such kind, or a number is out of its range.

    Example:
        >>> from random import Random
        >>> from thinwire.planning.simulate.durations import parse_distribution
        >>> parse_distribution("50ms", argument="--compute-time 50ms").draw(Random(0))
        0.05
        >>> slow = parse_distribution("pareto(50ms, 2.5)", argument="...")
        >>> 0.05 <= slow.draw(Random(0)) < 1.0
        True
    """

    kind: str = "constant"
    first: float = 0.0
    second: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _DRAWS:
            raise ConfigError(f"kind={self.kind!r}: must be one of {', '.join(_DRAWS)}")
        if not 0 <= self.first < inf:
            raise ConfigError(f"first={self.first} of a {self.kind} duration: must be seconds, finite and not negative")
        least = {"uniform": self.first, "normal": 0.0, "lognormal": 0.0, "pareto": 0.0}.get(self.kind)
        if least is not None and not least <= self.second < inf:
            raise ConfigError(f"second={self.second} of a {self.kind} duration: must be finite and at least {least:g}")
        if self.kind == "pareto" and not self.second:
            raise ConfigError(f"second={self.second} of a pareto duration: must be its tail's exponent, such as 2.5")

    def draw(self, random: Random) -> float:
        """Draw one."""
        return _DRAWS[self.kind](random, self.first, self.second)


def parse_distribution(text: str, *, argument: str) -> Duration:
    """Read `50ms`, or `pareto(50ms, 2.5)`.

    Args:
        text: the duration; its kinds are those of `Duration`.
        argument: the whole argument that it is part of, for the error.

    Raises:
        ConfigError: it cannot be read, or a number is out of its range.
    """
    form = _FORM.fullmatch(text.strip().lower())
    if form is None:
        return Duration("constant", seconds(text, argument=argument))
    kind, numbers = form[1], [each.strip() for each in form[2].split(",")]
    refusal = ConfigError(f"{argument}: {text!r} cannot be read; {_RULE}")
    if kind not in _DRAWS or kind == "constant" or len(numbers) != (1 if kind == "exponential" else 2):
        raise refusal
    first = seconds(numbers[0], argument=argument)
    if kind == "exponential":
        return Duration(kind, first)
    if kind in ("uniform", "normal"):
        second = seconds(numbers[1], argument=argument)
        if kind == "uniform" and second < first:
            raise ConfigError(f"{argument}: {text!r}: the longest duration comes second, such as uniform(40ms, 60ms)")
        return Duration(kind, first, second)
    try:
        second = float(numbers[1])
    except ValueError:
        raise refusal from None
    if not 0 < second < inf:
        raise ConfigError(f"{argument}: {text!r}: {numbers[1]} must be positive and finite; {_RULE}")
    return Duration(kind, first, second)


def seconds(text: str, *, argument: str) -> float:
    """Read `200ms` as 0.2, and `0` or `0s` as 0."""
    if re.fullmatch(r"0+(\.0*)?\s*(us|ms|s)?", text.strip()):
        return 0.0
    return parse_duration(text, argument=argument)
