"""Classes that recipes may name: strategies, codecs, topologies and their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar, dataclass_transform

from thinwire.errors import ConfigError
from thinwire.validation import check_field_types

T = TypeVar("T")
REGISTERED: dict[str, type] = {}
"""Every registered class by its name."""


@dataclass_transform(frozen_default=True)
def registered(kind: type[T]) -> type[T]:
    """Make a class a frozen dataclass that checks the types of its fields, and let recipes name it.

    Its repr is the recipe. `__post_init__`, if there is one, runs after the types are checked.

    Raises:
        ConfigError: another class has this name; when an instance is made, a field has a wrong type.

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
        """Check the types of the fields."""
        check_field_types(self)
        if check is not None:
            check(self)

    kind.__post_init__ = __post_init__ if check is None else wraps(check)(__post_init__)  # type: ignore[attr-defined]
    made = dataclass(frozen=True)(kind)
    other = REGISTERED.get(made.__name__, made)
    if other.__module__ != made.__module__:
        raise ConfigError(f"{made.__module__}.{made.__name__}: {other.__module__} has a class of that name; rename one")
    REGISTERED[made.__name__] = made
    return made
