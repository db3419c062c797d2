"""Do the values of a recipe have the kinds that its fields ask for?"""

from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from thinwire.errors import ConfigError

_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "True or False", NoneType: "None"}


def check_kinds(recipe: Any) -> None:
    """Refuse a dataclass whose values are not of the kinds its annotations name.

    Raises:
        ConfigError: naming the first such field, its value and what it should be.
    """
    name, hints = type(recipe).__name__, _hints(type(recipe))
    for field in fields(recipe):
        value, hint = getattr(recipe, field.name), hints[field.name]
        if not _fits(value, hint):
            fix = f"; write {value.__name__}()" if isinstance(value, type) else ""
            raise ConfigError(f"{name}({field.name}={value!r}): {field.name} must be {_in_words(hint)}{fix}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_in_words(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return " or ".join(repr(option) for option in get_args(hint))
    return _WORDS.get(hint) or f"a {hint.__name__}"
