"""Recipes as text: the repr of a strategy, and a parser that reads it back without running code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from thinwire import strategies, topology  # pyright: ignore[reportUnusedImport]  # noqa: F401
from thinwire.codecs.cast import Bf16, Fp8, Fp16, Fp32
from thinwire.codecs.feedback import ErrorFeedback
from thinwire.codecs.majority import MajorityVote
from thinwire.codecs.natural import Natural
from thinwire.codecs.one_bit import OneBit
from thinwire.codecs.qsgd import QSGD
from thinwire.codecs.quantize import Quantize
from thinwire.codecs.random_k import RandomK
from thinwire.codecs.sketch import Sketch
from thinwire.codecs.terngrad import TernGrad
from thinwire.codecs.top_k import TopK
from thinwire.errors import ConfigError
from thinwire.registry import REGISTERED
from thinwire.strategies.base import Strategy
from thinwire.topology.base import Topology

CODECS: tuple[type, ...] = (
    *(
        Bf16,
        ErrorFeedback,
        Fp8,
        Fp16,
        Fp32,
        MajorityVote,
        Natural,
        OneBit,
        QSGD,
        Quantize,
        RandomK,
        Sketch,
        TernGrad,
        TopK,
    ),
)

RECIPE_CLASSES: Mapping[str, type] = REGISTERED
"""The classes that a recipe may name; it can name nothing else, whoever wrote it."""

_STRATEGY_EXAMPLE = "write it like SlowMo(period=12)"
_TOPOLOGY_EXAMPLE = "write it like Ring() or Hierarchical(node_size=8)"


def parse(text: str) -> Strategy:
    """The strategy that a recipe names, as in "SlowMo(base=PushSum(), period=48)"; a bare name is its defaults.

    Nothing is evaluated: names are looked up among the strategies, topologies and codecs, arguments are literals.

    Raises:
        ConfigError: the text is no recipe, has an unknown name or argument, or a value that its class refuses.

    Example:
        >>> strategy = parse("SlowMo(base=PushSum, period=48)")
        >>> strategy.period, strategy.momentum
        (48, 0.5)
        >>> parse(repr(strategy)) == strategy
        True
        >>> brief(strategy)
        'SlowMo(base=PushSum(), period=48)'
    """
    where = f"strategy {_shortened(text)}"
    strategy = _parsed(text, where, _STRATEGY_EXAMPLE)
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{where}: is a {type(strategy).__name__}, not a strategy; {_STRATEGY_EXAMPLE}")
    return strategy


def parse_topology(text: str) -> Topology:
    """The graph that a recipe names, as in "Hierarchical(node_size=8)"; a bare name is its defaults.

    Raises:
        ConfigError: the text is no recipe, has an unknown name or argument, or a value that its class refuses.
    """
    where = f"topology {_shortened(text)}"
    graph = _parsed(text, where, _TOPOLOGY_EXAMPLE)
    if not isinstance(graph, Topology):
        raise ConfigError(f"{where}: is a {type(graph).__name__}, not a topology; {_TOPOLOGY_EXAMPLE}")
    return graph


def brief(recipe: Any) -> str:
    """A recipe as one would write it: its repr without the arguments that are at their defaults."""
    if not is_dataclass(recipe):
        return repr(recipe)
    arguments = [
        f"{field.name}={brief(value)}"
        for field in fields(recipe)
        if (value := getattr(recipe, field.name)) != field.default
    ]
    return f"{type(recipe).__name__}({', '.join(arguments)})"


def _parsed(text: str, where: str, example: str) -> Any:
    """The object that a recipe names; errors begin with `where`, and end with `example` if they concern all of it."""
    try:
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise ConfigError(f"{where}: {reason}; {example}") from None
        return _build(tree, where)
    except (RecursionError, MemoryError):
        # Both the parser of Python and the walk over its tree recurse as deeply as the text is nested.
        raise ConfigError(f"{where}: nested too deeply; {example}") from None


def _build(node: ast.expr, where: str) -> Any:
    """The value of a syntax tree: a known name, a call of one, or a literal."""
    if isinstance(node, ast.Name):
        return _call(node.id, [], [], where)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if any(keyword.arg is None for keyword in node.keywords):
            raise ConfigError(f"{where}: ** is not understood; name each argument")
        keywords = [(str(keyword.arg), _build(keyword.value, where)) for keyword in node.keywords]
        return _call(node.func.id, [_build(argument, where) for argument in node.args], keywords, where)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        wrong = _shortened(ast.unparse(node))
        raise ConfigError(f"{where}: {wrong} is neither a literal nor a known name") from None


def _call(name: str, arguments: list[Any], keywords: list[tuple[str, Any]], where: str) -> Any:
    if name not in RECIPE_CLASSES:
        raise ConfigError(f"{where}: {name!r} is unknown{_suggestion(name, sorted(RECIPE_CLASSES, key=str.lower))}")
    kind = RECIPE_CLASSES[name]
    known = [field.name for field in fields(kind)]
    where = f"{where}: {name}"
    if len(arguments) > len(known):
        raise ConfigError(f"{where} was given {len(arguments)} arguments{_listed(known)}")
    # Arguments are checked here and not by the call, whose TypeError could suggest no fix.
    given = known[: len(arguments)]
    for keyword, _ in keywords:
        if keyword not in known:
            raise ConfigError(f"{where} has no {keyword!r}{_suggestion(keyword, known)}")
        if keyword in given:
            raise ConfigError(f"{where} was given {keyword!r} twice; keep one")
        given.append(keyword)
    return kind(*arguments, **dict(keywords))


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


def _suggestion(word: str, known: list[str]) -> str:
    lowered = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return (f"; did you mean {lowered[close[0]]}?" if close else "") + _listed(known)


def _listed(known: list[str]) -> str:
    return f" (known: {', '.join(known)})" if known else " (it takes no arguments)"
