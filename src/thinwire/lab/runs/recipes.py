# SPDX-License-Identifier: Apache-2.0
"""Recipes of a run: thinwire's strategies, and PyTorch's own methods by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from thinwire.elastic.late import LateMerging
from thinwire.errors import ConfigError
from thinwire.lab.runs.baselines import KINDS, Baseline
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.methods.strategies.recipe import read
from thinwire.methods.topology.base import Topology
from thinwire.planning.plan.traffic import parts_of, topologies
from thinwire.registry import REGISTERED, canonical

Recipe = Strategy | Baseline
BASELINES: Mapping[str, type[Baseline]] = KINDS


def parse_recipe(text: str, *, imports: bool = True) -> Recipe:
    """Read a strategy, or one of PyTorch's own: `ddp`, `ddp+bf16`, `ddp+powersgd`, `post-local-sgd`.

    The last two take arguments, as in `ddp+powersgd(rank=4)`. Nothing is evaluated.

    Args:
        text: the recipe.
        imports: whether modules of other packages may be imported, as in `thinwire.parse`; False for text from a file.

    Raises:
        ConfigError: an unknown name or argument, or a value that the recipe refuses.
    """
    example = "SlowMo(period=12) or ddp+powersgd(rank=4)"
    kinds = (Strategy, Baseline)
    return read(text, kinds, what="strategy", example=example, imports=imports, more=BASELINES)


def parse_strategy(text: str, why_not: str, *, imports: bool = True) -> Strategy:
    """Read a recipe that must not be one of torch's own methods.

    Args:
        text: the recipe.
        why_not: the rule and the fix, for the error.
        imports: as in `parse_recipe`.

    Raises:
        ConfigError: it cannot be read, or is one of torch's own methods.
    """
    recipe = parse_recipe(text, imports=imports)
    if isinstance(recipe, Baseline):
        raise ConfigError(f"{text}: is torch's own method, {why_not}")
    return recipe


def parse_late(text: str, *, imports: bool = True) -> LateMerging:
    """Read how rounds close without late workers, such as `late` or `late(quorum=0.5)`.

    Args:
        text: the options of `LateMerging`.
        imports: whether modules of other packages may be imported, as in `thinwire.parse`; False for text from a file.

    Raises:
        ConfigError: an unknown name or argument, or a value that is refused.
    """
    example = 'late or "late(quorum=0.5)"'
    return read(text, LateMerging, what="late", example=example, imports=imports, more={"late": LateMerging})


def split_recipes(text: str) -> list[str]:
    """Return the recipes in a text that separates them by semicolons, each in its canonical form.

    Raises:
        ConfigError: there is none, one occurs twice, or one cannot be read.
    """
    try:
        recipes = [describe(parse_recipe(part)) for part in text.split(";") if part.strip()]
    except ConfigError as error:
        if ";" in text or ")," not in text:
            raise
        raise ConfigError(f"{error}. Separate several strategies by semicolons") from error
    if not recipes:
        raise ConfigError(f"strategies {text!r}: name at least one, such as 'AllReduce(); LocalSGD(period=8); ddp'")
    twice = next((recipe for recipe in recipes if recipes.count(recipe) > 1), None)
    if twice:
        raise ConfigError(f"strategies {text!r}: {twice} is named twice. Use --rounds to run each several times")
    return recipes


def describe(recipe: Recipe) -> str:
    """Return the canonical text, which `parse_recipe` reads back: without arguments at their defaults."""
    return str(recipe) if isinstance(recipe, Baseline) else canonical(recipe)


def topology_of(recipe: Recipe) -> Topology | None:
    """Return the graph that a recipe, or one within it, sends along; None where all workers talk to all."""
    return next(iter(topologies(recipe)), None)


def modules_of(recipe: Recipe) -> list[str]:
    """Return the modules of other packages that the recipe's classes and outer optimizers are in.

    Another process must import them to read the recipe.

    Raises:
        ConfigError: a class is defined in a program, or within a function, where no other process can import it.
    """
    parts = [part for _, part in parts_of(recipe)]
    kinds = [kind for kind in map(type, parts) if f"{kind.__module__}:{kind.__name__}" in REGISTERED]
    for kind in kinds:
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind or kind.__module__ == "__main__":
            raise ConfigError(
                f"{recipe!s}: {kind.__name__} is defined in the program itself or in a function, and the "
                "workers are other processes. Put it into a module, which they can import"
            )
    optimizers = {part.module for part in parts if isinstance(part, OuterOptimizer) and part.module}
    baselines = {kind.__module__ for kind in map(type, parts) if issubclass(kind, Baseline)} - {Baseline.__module__}
    return sorted({kind.__module__ for kind in kinds} | optimizers | baselines)
