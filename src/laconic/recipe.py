"""Recipes as text: the repr of a strategy, parsed back safely."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from laconic import strategies, topology
from laconic.codecs.cast import Bf16, Fp16
from laconic.errors import ConfigError
from laconic.strategies.base import Strategy

WORDS: Mapping[str, type] = {
    **{name: getattr(strategies, name) for name in strategies.__all__ if name != "Strategy"},
    **{name: getattr(topology, name) for name in topology.__all__ if name not in ("Topology", "Peers")},
    "Bf16": Bf16,
    "Fp16": Fp16,
}


def parse(text: str) -> Strategy:
    """The strategy that a recipe names, as in "SlowMo(base=PushSum(), period=48)"; a bare name is its defaults.

    Nothing is evaluated: names are looked up among the strategies, topologies and codecs, arguments are literals.

    Raises:
        ConfigError: not a recipe, an unknown name or argument, or a value that the recipe refuses.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ConfigError(f"strategy {text!r}: {error.msg}; write it like SlowMo(period=12)") from None
    strategy = _build(tree, text)
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy {text!r}: is a {type(strategy).__name__}, not a strategy")
    return strategy


def _build(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return _call(node.id, [], {}, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        keywords = {k.arg: _build(k.value, text) for k in node.keywords if k.arg is not None}
        return _call(node.func.id, [_build(a, text) for a in node.args], keywords, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ConfigError(f"strategy {text!r}: {ast.unparse(node)!r} is neither a literal nor a known name") from None


def _call(name: str, arguments: list[Any], keywords: dict[str, Any], text: str) -> Any:
    if name not in WORDS:
        raise ConfigError(f"strategy {text!r}: {name!r} is unknown{_suggest(name, list(WORDS))}")
    kind = WORDS[name]
    known = [field.name for field in fields(kind)]
    for keyword in keywords:
        if keyword not in known:
            raise ConfigError(f"strategy {text!r}: {name} has no {keyword!r}{_suggest(keyword, known)}")
    try:
        return kind(*arguments, **keywords)
    except TypeError as error:
        raise ConfigError(f"strategy {text!r}: {name}: {error}; its arguments are {', '.join(known)}") from None


def _suggest(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1, cutoff=0.5) or get_close_matches(
        word.lower(), [k.lower() for k in known], n=1, cutoff=0.5
    )
    nearest = next((k for k in known if close and k.lower() == close[0].lower()), None)
    hint = f"; did you mean {nearest}?" if nearest else ""
    return f"{hint} (known: {', '.join(sorted(known))})" if known else f"{hint} (it takes no arguments)"
