# SPDX-License-Identifier: Apache-2.0
"""A command's options as its type hints have them, and the check that what is given for them can be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

from thinwire.errors import ConfigError

POSITIONAL = get_args(Positional[int])[1]
"""What `Positional[...]` adds to a type."""
_EXAMPLES = {"parameters": "6.5e6", "seconds": "60", "target-loss": "2.5"}
_MOST_SHOWN = 200


def split_hint(hint: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations, and the annotations."""
    metadata: list[Any] = []
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        metadata += more
    return hint, metadata


@dataclass(frozen=True)
class Option:
    """One option of a command, or one positional argument.

    Attributes:
        name: as on the command line, without hyphens before it.
        kind: of its value, without None.
        default: that of the field.
        positional: whether it is given without its name.
    """

    name: str
    kind: Any
    default: object
    positional: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The only values, if there is a list of them."""
        return tuple(map(str, get_args(self.kind))) if get_origin(self.kind) is Literal else ()

    @property
    def several(self) -> bool:
        """Whether it takes all words that follow."""
        return get_origin(self.kind) is tuple

    @property
    def example(self) -> str:
        """A value that can be read."""
        if self.choices:
            return self.choices[0]
        if self.kind in (int, float):
            number = "4" if self.kind is int else _EXAMPLES.get(self.name, "0.1")
            return number if self.default is None or self.default is MISSING else f"{self.default}"
        return ""

    def rule(self, value: str) -> str:
        """What a value must be, if it cannot be read; "" if it can."""
        if self.default is None and value == "None":
            return ""
        if self.choices:
            *others, last = self.choices
            return "" if value in self.choices else f"must be {', '.join(others)} or {last}"
        try:
            if self.kind in (int, float):
                self.kind(value)
        except ValueError:
            number = "a whole number" if self.kind is int else "a number"
            return f"must be {number}, such as {self.example}"
        return ""


def options_of(command: type[Any]) -> Iterator[Option]:
    """The options and positional arguments of a command, in the order of its fields."""
    hints = get_type_hints(command, include_extras=True)
    for field in fields(command):
        hint, metadata = split_hint(hints[field.name])
        name = next((each.name for each in metadata if getattr(each, "name", None)), field.name)
        kind = next(each for each in get_args(hint) if each is not NoneType) if NoneType in get_args(hint) else hint
        yield Option(name.replace("_", "-"), kind, field.default, POSITIONAL in metadata)


def check_values(command: type[Any], arguments: Sequence[str]) -> None:
    """Refuse a value that is no number where one is needed, that is none of a list, or that is missing.

    tyro would do so too, in the words of Python's types and on ten lines. All other mistakes are left to it.

    Raises:
        ConfigError: with the option, the value and what it must be.
    """
    options = list(options_of(command))
    named = {each.name: each for each in options if not each.positional}
    places = iter([each for each in options if each.positional])
    words = iter(arguments)
    if {"-h", "--help"} & set(arguments):
        return
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            return
        if not word.startswith("--"):
            place = next(places, None)
            # What follows is a command of its own, or one word too many.
            if place is None or place.several:
                return
            _check(place, word, word)
            continue
        option = named.get(name.replace("_", "-"))
        # An option that is not known may have a value or none.
        if option is None:
            return
        if option.kind is bool:
            continue
        given = value if equals else next(words, None)
        if given is None or (not equals and _is_option(given, named)):
            example = f", such as {option.example}" * bool(option.example)
            raise ConfigError(f"--{option.name}: needs a value{example}")
        _check(option, f"--{option.name} {given}", given)


def _check(option: Option, words: str, value: str) -> None:
    rule = option.rule(value)
    if rule:
        raise ConfigError(f"{words[:_MOST_SHOWN]}: {rule}")


def _is_option(word: str, named: dict[str, Option]) -> bool:
    return word.startswith("--") and word.removeprefix("--").partition("=")[0].replace("_", "-") in named
