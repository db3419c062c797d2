# SPDX-License-Identifier: Apache-2.0
"""Recipes as text: the repr of a strategy, and a parser that reads it back without running code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import Any, TypeVar

from thinwire.errors import ConfigError, ThinwireError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.methods.strategies.user_classes import user_class, user_module
from thinwire.methods.topology.base import Topology
from thinwire.registry import REGISTERED, Recipe, entry_points, parsed, recipe_classes

T = TypeVar("T")
# Names that Python's grammar would take for something else: `module:Class`, and words joined by signs, as in slow-mo.
_LONG_NAME = re.compile(r"(?<![\w.])(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*|[^\W\d]\w*(?:[+-][^\W\d]\w*)+)")
# A class with no more arguments than this has all of them listed where one is unknown.
_FEW = 6


def parse(text: str, *, imports: bool = True) -> Strategy:
    """Parse a strategy from its recipe, such as "SlowMo(base=PushSum(), period=48)".

    No code is evaluated: names are looked up among the strategies, topologies and codecs, and arguments are literals. A
    name without arguments stands for the defaults. Case, hyphens and underscores do not matter: slow-mo is SlowMo.
    Write a registered class of another package with its module, as in "SlowMo(base=my_package.methods:Mine(period=4))";
    the module is imported, also from the current folder.

    Args:
        text: the recipe.
        imports: whether modules of other packages may be imported; False for text from a file or another process.

    Raises:
        ConfigError: the text is not a recipe, or it has an unknown name, an unknown argument or an invalid value.

    Example:
        >>> strategy = parse("SlowMo(base=PushSum, period=48)")
        >>> strategy.period, strategy.momentum
        (48, 0.5)
        >>> parse(repr(strategy)) == strategy
        True
        >>> str(strategy), str(parse("slow-mo"))
        ('SlowMo(base=PushSum, period=48)', 'slow-mo')
    """
    return read(text, Strategy, what="strategy", example="SlowMo(period=12)", imports=imports)


def parse_topology(text: str, *, imports: bool = True) -> Topology:
    """Parse a topology from its recipe, such as "Hierarchical(node_size=8)".

    Args:
        text: the recipe.
        imports: whether modules of other packages may be imported, as in `parse`.

    Raises:
        ConfigError: the text is not a recipe, or it has an unknown name, an unknown argument or an invalid value.
    """
    return read(text, Topology, what="topology", example="Ring() or Hierarchical(node_size=8)", imports=imports)


def read(
    text: str,
    kind: type[T] | tuple[type[T], ...],
    *,
    what: str,
    example: str,
    imports: bool = True,
    more: Mapping[str, type] | None = None,
) -> T:
    """Parse an object from its recipe.

    Args:
        text: the recipe.
        kind: the class that the object must be an instance of.
        what: the name of that class in errors.
        example: a valid recipe, for errors.
        imports: whether modules of other packages may be imported, as in `parse`.
        more: further classes that the recipe may name, by name.

    Raises:
        ConfigError: the text is not a recipe, or it has an unknown name, an unknown argument or an invalid value.
    """
    where, text = f"{what} {_shortened(repr(text))}", text.strip()
    try:
        try:
            # Every sign keeps its place, so that names and literals can be read from the text itself.
            tree = parsed(_LONG_NAME.sub(lambda name: re.sub(r"\W", "_", name[0]), text))
        except (SyntaxError, ValueError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise ConfigError(f"{where}: {reason}. Write it like {example}") from None
        found = _Reader(text, where, example, more or {}, imports, kind).build(tree)
    except (RecursionError, MemoryError):
        # Python's parser and the walk over its tree both recurse as deeply as the text is nested.
        raise ConfigError(f"{where}: nested too deeply. Write it like {example}") from None
    if not isinstance(found, kind):
        raise ConfigError(f"{where}: is a {type(found).__name__}, not a {what}. Write it like {example}")
    typed = re.sub(r"\s*,\s*", ", ", " ".join(text.split()))
    if isinstance(found, Recipe) and typed.isprintable():
        object.__setattr__(found, "_typed", typed)
    return found


@dataclass(frozen=True)
class _Reader:
    """Creates the objects of a recipe's syntax tree; errors begin with `where`."""

    text: str
    where: str
    example: str
    more: Mapping[str, type]
    imports: bool
    kind: type | tuple[type, ...]

    def build(self, node: ast.expr) -> Any:
        """Create the value of a syntax tree: a class, a call of a class, or a literal."""
        if isinstance(node, ast.Name):
            return self.call(self.source(node), ast.Call(node, [], []))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.call(self.source(node.func), node)
        source = self.source(node)
        try:
            return ast.literal_eval(parsed(f"({source})"))
        except (SyntaxError, ValueError, TypeError):
            wrong = _shortened(repr(source))
            raise ConfigError(
                f"{self.where}: {wrong} is neither a literal nor a known name. Write it like {self.example}"
            ) from None

    def call(self, name: str, call: ast.Call) -> Any:
        """Create an instance of the named class with the arguments of a call."""
        kind, where = self.find(name), f"{self.where}: {name}"
        parameters = signature(kind).parameters.values()
        taken = [each for each in parameters if each.kind is not Parameter.VAR_KEYWORD]
        known = [each.name for each in taken]
        if len(call.args) > len(known):
            raise ConfigError(f"{where} was given {len(call.args)} arguments{_listed(known)}")
        # Arguments are checked here and not by the class, whose TypeError could suggest no fix.
        given = {key: self.build(value) for key, value in zip(known, call.args, strict=False)}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ConfigError(f"{self.where}: ** is not understood. Name each argument")
            key = _same(keyword.arg, known) or (keyword.arg if len(taken) < len(parameters) else None)
            if key is None:
                hint = _nearest(keyword.arg, known) + (_listed(known) if len(known) <= _FEW else "")
                raise ConfigError(f"{where} has no {keyword.arg!r}{hint}")
            if key in given:
                raise ConfigError(f"{where} was given {key!r} twice. Keep one")
            given[key] = self.build(keyword.value)
        for each in taken:
            if each.name not in given and each.default is Parameter.empty:
                raise ConfigError(f"{where} needs {each.name!r}. Write {name}({each.name}=...)")
        optimizer = given.get("optimizer")
        if kind is OuterOptimizer and isinstance(optimizer, str) and ":" in optimizer:
            user_module(optimizer, where, imports=self.imports)
        try:
            return kind(**given)
        except ThinwireError:
            raise
        except Exception as error:
            # The text also causes unexpected errors of a class, and a traceback would not show it.
            raise ConfigError(f"{where} refuses its arguments: {type(error).__name__}: {error}") from error

    def find(self, name: str) -> type:
        """Return the named class."""
        if ":" in name:
            return user_class(name, self.where, imports=self.imports)
        own = {**recipe_classes(), **self.more}
        users = {full: full.partition(":")[2] or full for full in REGISTERED if full not in own}
        names = [*own, *entry_points(), *users.values()]
        found = _same(name, names)
        if found is None:
            # The outermost name can only be one of the kind that is asked for, as far as that is known.
            other = {each for each in own if self.text.startswith(name) and not issubclass(own[each], self.kind)}
            likely = [each for each in names if each not in other]
            raise ConfigError(f"{self.where}: {_shortened(repr(name))} is unknown{_nearest(name, likely)}")
        if found in own:
            return own[found]
        if found in entry_points():
            return user_class(entry_points()[found], self.where, imports=self.imports)
        full = sorted(full for full, short in users.items() if short == found)
        if len(full) > 1:
            raise ConfigError(f"{self.where}: {name!r} could be {' or '.join(full)}. Write one of these")
        return REGISTERED[full[0]]

    def source(self, node: ast.expr) -> str:
        """Return the original text of a syntax tree."""
        return ast.get_source_segment(self.text, node) or ""


def _shortened(text: str) -> str:
    return text if len(text) <= 102 else f"{text[:98]}...{text[-1]}"


def _plain(name: str) -> str:
    """Return a name without case, hyphens and underscores."""
    return re.sub(r"[-+_]", "", name).lower()


def _same(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that equals this one, ignoring case, hyphens and underscores."""
    return name if name in known else {_plain(each): each for each in known}.get(_plain(name))


def _nearest(word: str, known: Sequence[str]) -> str:
    """Suggest the three known names that are most similar to a word."""
    plain = {_plain(name): name for name in known}
    close = [plain[name] for name in get_close_matches(_plain(word), plain, n=3, cutoff=0.0)]
    return f"; did you mean {', '.join(close[:-1])}{' or ' * (len(close) > 1)}{close[-1]}?" if close else ""


def _listed(known: Sequence[str]) -> str:
    return f" (known: {', '.join(known)})" if known else " (it takes no arguments)"
