# SPDX-License-Identifier: Apache-2.0
"""Fields of the classes that recipes can name, with defaults and meanings, as tables in Markdown."""

import inspect
import re
from dataclasses import MISSING, fields

from thinwire import Codec, Topology
from thinwire.registry import recipe_classes

_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.DOTALL | re.MULTILINE)


def classes_of(what: str) -> list[type]:
    """The codecs, topologies, or strategies and their parts that recipes can name, by name, those with fields."""
    return [kind for kind in recipe_classes().values() if part_of(kind) == what and shown(kind)]


def part_of(kind: type) -> str:
    """The section of the reference that a class belongs to."""
    return "codecs" if issubclass(kind, Codec) else "topology" if issubclass(kind, Topology) else "strategies"


def shown(kind: type) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of each field of a class, from the class and its docstring."""
    meanings = meanings_of(kind)
    return [(each.name, default_of(each), meanings.get(each.name, "")) for each in fields(kind) if each.init]


def default_of(field: object) -> str:
    """The default as a recipe writes it; "required" without one."""
    default, factory = getattr(field, "default", MISSING), getattr(field, "default_factory", MISSING)
    if default is MISSING and factory is MISSING:
        return "required"
    value = default if default is not MISSING else factory()
    return f"`{inspect.getattr_static(value, '__name__', None) or value!r}`"


def meanings_of(kind: type) -> dict[str, str]:
    """What the `Args` of a class's docstring say of each field."""
    text = inspect.getdoc(kind) or ""
    part = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    return {} if part is None else {name: " ".join(words.split()) for name, words in _ARGUMENT.findall(part[1])}


def table_of(kind: type) -> str:
    """One class in Markdown: its first line, and a table."""
    first = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    rows = [
        f"| `{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |" for name, default, meaning in shown(kind)
    ]
    head = ["| Hyperparameter | Default | Meaning |", "|---|---|---|"]
    return "\n".join([f"## {kind.__name__}", "", first, "", *head, *rows])
