# SPDX-License-Identifier: Apache-2.0
"""Packages whose public names are imported when they are first used."""

import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

_PUBLIC = re.compile(r"^ *from (thinwire\.\S+) import (\w+) as \2$", re.MULTILINE)


def public_names(path: str | Path) -> dict[str, str]:
    """Return the modules of the names that a file declares public, as in `from thinwire.errors import X as X`."""
    return {name: module for module, name in _PUBLIC.findall(Path(path).read_text(encoding="utf-8"))}


def importer(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package, which imports a name from its module once."""

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
