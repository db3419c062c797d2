# SPDX-License-Identifier: Apache-2.0
"""Check the types and the ranges of a recipe's fields when it is created."""

from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError

_DESCRIPTIONS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


class Range(NamedTuple):
    """The range of a field, in its annotation.

    Attributes:
        within: the range, as in `check_range`. It may name other fields, as in "1..{period}".
        fix: the end of the error, as in `check_range`. It may name other fields too.

    Example:
        >>> from dataclasses import dataclass
        >>> from typing import Annotated
        >>> @dataclass(frozen=True)
        ... class Delayed:
        ...     period: Annotated[int, Range("1..", "8 is usual")] = 8
        ...     delay: Annotated[int, Range("0..{period}", "0 waits for the mean")] = 0
        >>> check_fields(Delayed(delay=9))
        Traceback (most recent call last):
            ...
        thinwire.errors.ConfigError: delay=9: must lie in 0..8. 0 waits for the mean
    """

    within: str
    fix: str


@cache  # resolving annotations compiles their text
def _annotations(kind: type) -> tuple[dict[str, Any], list[tuple[str, Range]]]:
    """Return the type of each field, and the ranges; those that name other fields come last."""
    full = get_type_hints(kind, include_extras=True)
    ranges = [(name, each) for name, hint in full.items() for each in get_args(hint) if isinstance(each, Range)]
    return get_type_hints(kind), sorted(ranges, key=lambda found: "{" in found[1].within)


def check_fields(recipe: Any) -> None:
    """Check that every field of a dataclass has the type of its annotation, and lies in its range.

    Raises:
        ConfigError: with the first wrong field, its value, and the expected type or range.
    """
    name, (hints, ranges) = type(recipe).__name__, _annotations(type(recipe))
    for field in fields(recipe):
        value, hint = getattr(recipe, field.name), hints[field.name]
        if not _fits(value, hint):
            fix = f". Write {value.__name__}()" if isinstance(value, type) else ""
            raise ConfigError(f"{name}({field.name}={value!r}): {field.name} must be {_describe(hint)}{fix}")
    for name, limits in ranges:
        within, fix = (text.format_map(vars(recipe)) for text in limits)
        check_range(name, getattr(recipe, name), within, fix)


def check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Check that an argument is a number; NumPy numbers are accepted, True and False are not.

    Raises:
        ConfigError: with the argument, its value and the expected type.
    """
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise ConfigError(f"{name}={value!r}: must be {_DESCRIPTIONS[int if whole else float]}")


def check_ranges(recipe: Any, **ranges: tuple[str, str]) -> None:
    """Check that fields of a recipe lie in their ranges; None is accepted.

    Args:
        recipe: the object with these fields.
        ranges: for each field its range, as in `check_range`, and the end of the error.

    Raises:
        ConfigError: with the first wrong field, its value, its range and the fix.
    """
    for name, (within, fix) in ranges.items():
        check_range(name, getattr(recipe, name), within, fix)


def check_range(name: str, value: float | None, within: str, fix: str) -> None:
    """Check that an argument lies in a range; None is accepted.

    Args:
        name: the name of the argument.
        value: its value.
        within: "1.." or "1..8" for whole numbers, or an interval such as "[0, 1)" or "(0, inf)".
        fix: the end of the error: a usual value, or another way to the same aim.

    Raises:
        ConfigError: with the value, the range and the fix.

    Example:
        >>> check_range("momentum", 0.9, "[0, 1)", "0.9 is usual")
        >>> check_range("period", 0, "1..", "8 is usual")
        Traceback (most recent call last):
            ...
        thinwire.errors.ConfigError: period=0: must be at least 1. 8 is usual
    """
    if value is None:
        return
    if ".." in within:
        low, _, high = within.partition("..")
        fits = int(low) <= value <= float(high or "inf")
        rule = f"lie in {within}" if high else f"be at least {low}"
    else:
        low, high = map(float, within[1:-1].split(","))
        # NaN compares as False.
        fits = (low <= value if within[0] == "[" else low < value) and (
            value <= high if within[-1] == "]" else value < high
        )
        rule = _RULES.get(within, f"lie in {within}")
    if not fits:
        raise ConfigError(f"{name}={value}: must {rule}. {fix}")


_RULES = {"(0, inf)": "be positive and finite", "[0, inf)": "be finite and not negative"}


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
