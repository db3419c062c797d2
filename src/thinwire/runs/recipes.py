"""What may be compared: thinwire's recipes, and torch's own methods by name."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from thinwire.errors import ConfigError
from thinwire.runs.baselines import Bf16Gradients, Peer, Plain, PostLocalSGD, PowerSGD
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import WORDS, brief, parse

Recipe = Strategy | Peer
BASELINES: Mapping[str, type[Peer]] = {kind.name: kind for kind in (Plain, Bf16Gradients, PowerSGD, PostLocalSGD)}
_PEER = re.compile(r"([a-z][a-z0-9+-]*)\s*(\(.*\))?", re.DOTALL)


def parse_recipe(text: str) -> Recipe:
    """The strategy that a text names, or one of torch's own: `ddp`, `ddp+bf16`, `ddp+powersgd`, `post-local-sgd`.

    The last two take arguments, as in `ddp+powersgd(rank=4)`. Nothing is evaluated.

    Raises:
        ConfigError: an unknown name or argument, or a value that the recipe refuses.
    """
    match = _PEER.fullmatch(text.strip())
    if match is None or not _meant(match[1]):
        return parse(text)
    if match[1] not in BASELINES:
        close = _meant(match[1])
        raise ConfigError(f"strategy {text!r}: unknown; did you mean {close}? (torch's own are {', '.join(BASELINES)})")
    return _build(BASELINES[match[1]], _arguments(match[2] or "()", text), text)


def split_recipes(text: str) -> list[str]:
    """The recipes in a text that separates them by semicolons, each in its canonical form.

    Raises:
        ConfigError: there is none, one is named twice, or one cannot be read.
    """
    recipes = [describe(parse_recipe(part)) for part in text.split(";") if part.strip()]
    if not recipes:
        raise ConfigError(f"strategies {text!r}: name at least one, such as 'AllReduce(); LocalSGD(period=8); ddp'")
    twice = next((recipe for recipe in recipes if recipes.count(recipe) > 1), None)
    if twice:
        raise ConfigError(f"strategies {text!r}: {twice} is there twice; use --rounds to run each several times")
    return recipes


def describe(recipe: Recipe) -> str:
    """The text that `parse_recipe` reads back: as one would write it, without arguments at their defaults."""
    return str(recipe) if isinstance(recipe, Peer) else brief(recipe)


def _meant(word: str) -> str:
    """The peer that a word names or nearly names; empty where one of thinwire's own words is nearer."""
    own = [name.lower() for name in WORDS]
    close = get_close_matches(word, [*BASELINES, *own], n=1, cutoff=0.6)
    return close[0] if close and close[0] in BASELINES else ""


def _arguments(text: str, whole: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"peer{text}", mode="eval").body
        assert isinstance(call, ast.Call)
        named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg is not None}
    except (SyntaxError, ValueError):
        raise ConfigError(f"strategy {whole!r}: cannot be read; write arguments as in ddp+powersgd(rank=4)") from None
    if call.args:
        raise ConfigError(f"strategy {whole!r}: name its arguments, as in ddp+powersgd(rank=4)")
    return named


def _build(kind: type[Peer], arguments: dict[str, Any], text: str) -> Peer:
    known = [field.name for field in fields(kind)]
    for name, value in arguments.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            raise ConfigError(f"strategy {text!r}: {kind.name} has no {name!r}; {takes}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"strategy {text!r}: {name}={value!r} must be a whole number")
    return kind(**arguments)
