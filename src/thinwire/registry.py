# SPDX-License-Identifier: Apache-2.0
"""Find the classes that recipes may name: strategies, codecs, topologies and their parts."""

from __future__ import annotations

import ast
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache, wraps
from importlib import import_module, metadata
from inspect import Parameter, signature
from pkgutil import walk_packages
from threading import RLock
from typing import Any, TypeVar, dataclass_transform

from thinwire.core.validation import check_fields
from thinwire.errors import ConfigError

T = TypeVar("T")
PACKAGES = ("methods.codecs", "methods.strategies", "methods.topology", "asynchronous")
"""The packages of thinwire in which classes for recipes are defined."""
ENTRY_POINTS = "thinwire.recipes"
"""The group of entry points in which other distributions offer classes, each as `Name = "module:Class"`."""
REGISTERED: dict[str, type] = {}
"""Every class registered so far: thinwire's own by their names, all others by `module:Class`."""

_PARSING, _TRIES = RLock(), 4


@dataclass_transform(frozen_default=True)
def registered(kind: type[T]) -> type[T]:
    """Turn a class into a frozen dataclass with checked fields, and let recipes name it.

    Its repr is the recipe. Fields must have the types of their annotations, and lie in their `Range`; `__post_init__`,
    if defined, runs afterwards. The repr of a class that is defined outside thinwire contains its module, so that
    another process can read it. Recipes may leave the module out while it is imported and no other class has the same
    name.

    Raises:
        ConfigError: another class of thinwire has this name, or a field of a new instance has the wrong type or is out
            of its range.

    Example:
        >>> import thinwire
        >>> from thinwire.registry import registered
        >>> @registered
        ... class Silent(thinwire.Strategy):
        ...     period: int = 8
        >>> thinwire.parse("SlowMo(base=Silent(period=4))").base
        Silent(period=4)
        >>> Silent(period="4")
        Traceback (most recent call last):
            ...
        thinwire.errors.ConfigError: Silent(period='4'): period must be a whole number
    """
    check: Callable[[Any], None] | None = getattr(kind, "__post_init__", None)

    def __post_init__(self: Any) -> None:
        """Check the types and ranges of the fields."""
        check_fields(self)
        if check is not None:
            check(self)

    kind.__post_init__ = __post_init__ if check is None else wraps(check)(__post_init__)  # type: ignore[attr-defined]
    name = _full_name(kind)
    if ":" in name and "__repr__" not in vars(kind):
        kind.__repr__ = _repr
    made = dataclass(frozen=True)(kind)
    other = REGISTERED.get(name, made)
    if other.__module__ != made.__module__:
        raise ConfigError(
            f"{made.__module__}.{name}: {other.__module__} has a class with the same name. Rename one of them"
        )
    REGISTERED[name] = made
    return made


def recipe_classes() -> dict[str, type]:
    """Return thinwire's classes that recipes may name, by name; imports the modules that define them."""
    _import_packages()
    homes = tuple(f"thinwire.{package}." for package in PACKAGES)
    return {name: kind for name, kind in sorted(REGISTERED.items()) if kind.__module__.startswith(homes)}


@cache
def entry_points() -> dict[str, str]:
    """Map the names that installed distributions offer to `module:Class`; imports nothing.

    Names of thinwire's own classes and ambiguous names are left out.
    """
    found: dict[str, set[str]] = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        found.setdefault(point.name, set()).add(point.value.partition("[")[0].strip())
    own = recipe_classes()
    return {name: values.pop() for name, values in found.items() if len(values) == 1 and name not in own}


def name_in_recipes(kind: type) -> str:
    """Return the name of a class in recipes: its own, that of its entry point, or `module:Class`.

    Example:
        >>> import thinwire
        >>> name_in_recipes(thinwire.SlowMo)
        'SlowMo'
    """
    name = _full_name(kind)
    if ":" not in name or name not in REGISTERED:
        return kind.__name__
    return next((short for short, value in entry_points().items() if value == name), name)


class Recipe:
    """Base class of strategies, topologies and codecs, whose `str()` is the recipe as you wrote it."""

    _typed = ""
    """Return the text that the object was parsed from, or its repr."""

    def __str__(self) -> str:
        return self._typed or canonical(self)


def canonical(recipe: Any) -> str:
    """Return the recipe without default arguments, whatever text it was parsed from."""
    if not is_dataclass(recipe) or isinstance(recipe, type):
        return repr(recipe)
    arguments: list[str] = []
    for parameter in signature(type(recipe)).parameters.values():
        value = getattr(recipe, parameter.name)
        if parameter.kind is Parameter.VAR_KEYWORD:
            arguments += [f"{name}={each!r}" for name, each in value]
        elif value != parameter.default:
            arguments.append(f"{parameter.name}={canonical(value)}")
    return f"{name_in_recipes(type(recipe))}({', '.join(arguments)})"


@cache
def _import_packages() -> None:
    for package in PACKAGES:
        home = import_module(f"thinwire.{package}")
        for module in walk_packages(home.__path__, f"{home.__name__}."):
            import_module(module.name)


def _full_name(kind: type) -> str:
    mine = kind.__module__.partition(".")[0] == "thinwire"
    return kind.__name__ if mine else f"{kind.__module__}:{kind.__name__}"


def _repr(self: Any) -> str:
    """Return the recipe, with the module of the class if another process needs it."""
    arguments = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{name_in_recipes(type(self))}({', '.join(arguments)})"


@lru_cache(maxsize=1024)
def parsed(text: str) -> ast.expr:
    """Parse an expression; safe to call from several threads.

    CPython 3.11 counts the depth of a syntax tree in one place for all threads. It raises a `SystemError` if two
    threads parse at once, which a garbage collection during parsing can cause.

    Raises:
        SyntaxError: the text is not an expression.
    """
    with _PARSING:
        for _ in range(_TRIES):
            # Other packages may parse on their threads, which the lock does not stop.
            with suppress(SystemError):
                return ast.parse(text, mode="eval").body
        return ast.parse(text, mode="eval").body
