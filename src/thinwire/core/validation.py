# SPDX-License-Identifier: Apache-2.0
"""Checks the types of a recipe's fields when it is made."""

from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError

_DESCRIPTIONS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}

# Resolving annotations compiles their text, so it is done once per class.
_hints = cache(get_type_hints)


def check_field_types(recipe: Any) -> None:
    """Check that every field of a dataclass has the type of its annotation.

    Raises:
        ConfigError: with the first wrong field, its value and the expected type.
    """
    name, hints = type(recipe).__name__, _hints(type(recipe))
    for field in fields(recipe):
        value, hint = getattr(recipe, field.name), hints[field.name]
        if not _fits(value, hint):
            fix = f"; write {value.__name__}()" if isinstance(value, type) else ""
            raise ConfigError(f"{name}({field.name}={value!r}): {field.name} must be {_describe(hint)}{fix}")


def check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Check that an argument is a number; NumPy numbers are accepted, True and False are not.

    Raises:
        ConfigError: with the argument, its value and the expected type.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise ConfigError(f"{name}={value!r}: must be {_DESCRIPTIONS[int if whole else float]}")


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (int, float):
        # An int is a valid float. A bool is an int in Python, but is never meant as a number.
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    # Classes check the items of their containers themselves.
    return get_origin(hint) is not None or isinstance(value, hint)


def _describe(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_describe(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    return _DESCRIPTIONS.get(hint) or f"a {hint.__name__}"


def printable(text: str, limit: int | None = None) -> str:
    r"""Remove characters that could control a terminal, and cut the text at the limit.

    Example:
        >>> printable("\x1b[31mred\n", 6)
        '?[31mr'
    """
    return "".join(each if each.isprintable() else "?" for each in text[:limit])
