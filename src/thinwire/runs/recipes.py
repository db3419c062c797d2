"""Recipes of a run: thinwire's strategies, and PyTorch's own methods by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches

from thinwire.errors import ConfigError
from thinwire.runs.baselines import Baseline, Bf16Gradients, PlainDdp, PostLocalSGD, PowerSGD
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import RECIPE_CLASSES, brief, parse

Recipe = Strategy | Baseline
BASELINES: Mapping[str, type[Baseline]] = {
    kind.name: kind for kind in (PlainDdp, Bf16Gradients, PowerSGD, PostLocalSGD)
}
_BASELINE = re.compile(r"([a-z][a-z0-9+-]*)\s*(\(.*\))?", re.DOTALL)


def parse_recipe(text: str) -> Recipe:
    """Read a strategy, or one of PyTorch's own: `ddp`, `ddp+bf16`, `ddp+powersgd`, `post-local-sgd`.

    The last two take arguments, as in `ddp+powersgd(rank=4)`. Nothing is evaluated.

    Raises:
        ConfigError: an unknown name or argument, or a value that the recipe refuses.
    """
    match = _BASELINE.fullmatch(text.strip())
    close = "" if match is None else _closest_baseline(match[1])
    if match is None or not close:
        return parse(text)
    if match[1] not in BASELINES:
        raise ConfigError(f"strategy {text!r}: unknown; did you mean {close}? (torch's own are {', '.join(BASELINES)})")
    kind = BASELINES[match[1]]
    try:
        call = ast.parse(f"f{match[2] or '()'}", mode="eval").body
        assert isinstance(call, ast.Call)
        arguments = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
    except (SyntaxError, ValueError):
        raise ConfigError(f"strategy {text!r}: cannot be read; write arguments as in ddp+powersgd(rank=4)") from None
    if call.args:
        raise ConfigError(f"strategy {text!r}: name its arguments, as in ddp+powersgd(rank=4)")
    known = [field.name for field in fields(kind)]
    for name, value in arguments.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            raise ConfigError(f"strategy {text!r}: {kind.name} has no {name!r}; {takes}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"strategy {text!r}: {name}={value!r} must be a whole number")
    return kind(**arguments)


def _closest_baseline(word: str) -> str:
    """The baseline that a word names or nearly names; empty where a name of thinwire's own is closer."""
    close = get_close_matches(word, [*BASELINES, *(name.lower() for name in RECIPE_CLASSES)], n=1, cutoff=0.6)
    return close[0] if close and close[0] in BASELINES else ""


def split_recipes(text: str) -> list[str]:
    """The recipes in a text that separates them by semicolons, each in its canonical form.

    Raises:
        ConfigError: there is none, one occurs twice, or one cannot be read.
    """
    recipes = [describe(parse_recipe(part)) for part in text.split(";") if part.strip()]
    if not recipes:
        raise ConfigError(f"strategies {text!r}: name at least one, such as 'AllReduce(); LocalSGD(period=8); ddp'")
    twice = next((recipe for recipe in recipes if recipes.count(recipe) > 1), None)
    if twice:
        raise ConfigError(f"strategies {text!r}: {twice} is there twice; use --rounds to run each several times")
    return recipes


def describe(recipe: Recipe) -> str:
    """The canonical text, which `parse_recipe` reads back: without arguments at their defaults."""
    return str(recipe) if isinstance(recipe, Baseline) else brief(recipe)
