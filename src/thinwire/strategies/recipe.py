"""Recipes as text: the repr of a strategy, parsed back safely."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from thinwire import strategies, topology
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
from thinwire.strategies.base import Strategy
from thinwire.strategies.gradients.bit_rules import BitBudget, ErrorBound, FixedBits
from thinwire.strategies.local.outer_optimizer import OuterOptimizer
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

WORDS: Mapping[str, type] = {
    **{name: getattr(strategies, name) for name in strategies.__all__ if name != "Strategy"},
    **{name: getattr(topology, name) for name in topology.__all__ if name not in ("Topology", "Peers")},
    **{kind.__name__: kind for kind in CODECS},
    **{kind.__name__: kind for kind in (BitBudget, ErrorBound, FixedBits)},
    "OuterOptimizer": OuterOptimizer,
}

_EXAMPLE = "write it like SlowMo(period=12)"
_GRAPH = "write it like Ring() or Hierarchical(node_size=8)"


def parse(text: str) -> Strategy:
    """The strategy that a recipe names, as in "SlowMo(base=PushSum(), period=48)"; a bare name is its defaults.

    Nothing is evaluated: names are looked up among the strategies, topologies and codecs, arguments are literals.

    Raises:
        ConfigError: not a recipe, an unknown name or argument, or a value that the recipe refuses.
    """
    where = f"strategy {_short(text)}"
    strategy = _made(text, where, _EXAMPLE)
    if not isinstance(strategy, Strategy):
        raise ConfigError(f"{where}: is a {type(strategy).__name__}, not a strategy; {_EXAMPLE}")
    return strategy


def parse_topology(text: str) -> Topology:
    """The graph that a recipe names, as in "Hierarchical(node_size=8)"; a bare name is its defaults.

    Raises:
        ConfigError: not a recipe, an unknown name or argument, or a value that the recipe refuses.
    """
    where = f"topology {_short(text)}"
    graph = _made(text, where, _GRAPH)
    if not isinstance(graph, Topology):
        raise ConfigError(f"{where}: is a {type(graph).__name__}, not a topology; {_GRAPH}")
    return graph


def brief(recipe: Any) -> str:
    """A recipe as one would write it: its repr without the arguments that are at their defaults."""
    if not is_dataclass(recipe):
        return repr(recipe)
    told = [
        f"{field.name}={brief(value)}"
        for field in fields(recipe)
        if (value := getattr(recipe, field.name)) != field.default
    ]
    return f"{type(recipe).__name__}({', '.join(told)})"


def _made(text: str, where: str, example: str) -> Any:
    """What a recipe names; `where` begins every complaint, `example` ends those about the whole."""
    try:
        return _build(_tree(text, where, example), where)
    except (RecursionError, MemoryError):
        raise ConfigError(f"{where}: nested too deeply; {example}") from None


def _tree(text: str, where: str, example: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise ConfigError(f"{where}: {reason}; {example}") from None


def _build(node: ast.expr, where: str) -> Any:
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
        odd = _short(ast.unparse(node))
        raise ConfigError(f"{where}: {odd} is neither a literal nor a known name") from None


def _call(name: str, arguments: list[Any], keywords: list[tuple[str, Any]], where: str) -> Any:
    if name not in WORDS:
        raise ConfigError(f"{where}: {name!r} is unknown{_suggest(name, list(WORDS))}")
    kind = WORDS[name]
    known = [field.name for field in fields(kind)]
    where = f"{where}: {name}"
    if len(arguments) > len(known):
        raise ConfigError(f"{where} was given {len(arguments)} arguments{_listed(known)}")
    given = known[: len(arguments)]
    for keyword, _ in keywords:
        if keyword not in known:
            raise ConfigError(f"{where} has no {keyword!r}{_suggest(keyword, known)}")
        if keyword in given:
            raise ConfigError(f"{where} was given {keyword!r} twice; keep one")
        given.append(keyword)
    return kind(*arguments, **dict(keywords))


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:97]}...")


def _suggest(word: str, known: list[str]) -> str:
    lowered = {name.lower(): name for name in known}
    close = get_close_matches(word.lower(), lowered, n=1, cutoff=0.5)
    return (f"; did you mean {lowered[close[0]]}?" if close else "") + _listed(known)


def _listed(known: list[str]) -> str:
    return f" (known: {', '.join(known)})" if known else " (it takes no arguments)"
