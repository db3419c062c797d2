# SPDX-License-Identifier: Apache-2.0
"""The strategies that a run switches to, and after which steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from thinwire.errors import ConfigError
from thinwire.lab.runs.recipes import describe, parse_strategy
from thinwire.methods.strategies.base import Strategy, check_workers

_ENTRY = re.compile(r"\s*([0-9]+)\s*:(.*)", re.DOTALL)
_EXAMPLE = '"200: SlowMo(period=12)", or several separated by semicolons'


def parse_switches(text: str | None, *, imports: bool = True) -> dict[int, Strategy]:
    """Read strategies by the step after which they start, such as "200: SlowMo(period=12); 400: AllReduce()".

    Args:
        text: entries `STEP: RECIPE`, separated by semicolons; None for none.
        imports: whether modules of other packages may be imported, as in `thinwire.parse`.

    Raises:
        ConfigError: it cannot be read, steps do not rise, or a recipe is one of torch's own methods.

    Example:
        >>> parse_switches("200: SlowMo(period=12)")[200].period
        12
    """
    return dict(_entries(text, imports=imports)) if text is not None else {}


def _entries(text: str, *, imports: bool) -> Iterator[tuple[int, Strategy]]:
    last = 0
    for entry in text.split(";"):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise ConfigError(f"switch {entry.strip()!r}: must be STEP: RECIPE, such as {_EXAMPLE}")
        step, why_not = int(match[1]), "which cannot take over. Use AllReduce()"
        recipe = parse_strategy(match[2].strip(), why_not, imports=imports)
        if step <= last:
            raise ConfigError(f"switch {text!r}: steps must be at least 1 and rise; {step} comes after {last}")
        last = step
        yield step, recipe


def check_switches(text: str, first: str, workers: int) -> str:
    """Check that every strategy serves this number of workers; returns the canonical form.

    Args:
        text: as in `parse_switches`.
        first: the recipe that the run begins with.
        workers: how many train.

    Raises:
        ConfigError: it cannot be read, a recipe does not serve, or the first one cannot be left.
    """
    begins = parse_strategy(first, f"which cannot be left, as switch {text!r} asks. Begin with AllReduce()")
    found = parse_switches(text)
    every = math.lcm(*(each.traits.meets_every for each in (begins, *found.values())))
    for step, strategy in found.items():
        check_workers(strategy, workers)
        if step % every:
            raise ConfigError(
                f"switch {text!r}: workers are at the same step only after multiples of {every} steps. Use "
                f"{-(-step // every) * every}, and not {step}"
            )
    return "; ".join(f"{step}: {describe(strategy)}" for step, strategy in found.items())


def in_force(first: str, text: str | None, step: int) -> str:
    """Return the recipe of a checkpoint at a step: one that takes over there has not done so yet when it is saved."""
    past = [strategy for at, strategy in parse_switches(text, imports=False).items() if at < step]
    return describe(past[-1]) if past else first
