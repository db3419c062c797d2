# SPDX-License-Identifier: Apache-2.0
"""`{hyperparameters} PACKAGE`: a table of fields, defaults and meanings for each class, from the classes themselves."""

import inspect
import re
from dataclasses import MISSING, fields
from importlib import import_module
from pkgutil import walk_packages

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from thinwire.registry import recipe_classes

_ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.DOTALL | re.MULTILINE)


class Hyperparameters(SphinxDirective):
    """A section with a table for every class that recipes can name and that a package defines."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The sections, as if they had been written in Markdown."""
        text = "\n\n".join(table_of(kind) for kind in classes_of(self.arguments[0]))
        holder = nodes.section()
        holder.document = self.state.document
        self.state.nested_parse(StringList(text.split("\n"), source="hyperparameters"), 0, holder, match_titles=True)
        return holder.children


def classes_of(package: str) -> list[type]:
    """The classes that recipes can name and that are defined in a package of thinwire, by name, those with fields."""
    home = import_module(f"thinwire.{package}")
    modules = {home.__name__, *(each.name for each in walk_packages(home.__path__, f"{home.__name__}."))}
    return [kind for kind in recipe_classes().values() if kind.__module__ in modules and shown(kind)]


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


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("hyperparameters", Hyperparameters)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
