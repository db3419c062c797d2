# SPDX-License-Identifier: Apache-2.0
"""Help that shows `--out PATH` where tyro by itself shows `--out {None}|PATH ... (default: None)`."""

import re
import sys
from dataclasses import MISSING, field, fields, make_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import arg

from thinwire.cli.values import POSITIONAL, split_hint

_METAVARS: dict[Any, str] = {str: "STR", int: "INT", float: "FLOAT", Path: "PATH"}


# A row without words, between borders that may be coloured.
_EMPTY_ROW = re.compile(r"(?:\x1b\[[\d;]*m)*│(?:\x1b\[[\d;]*m| )*│(?:\x1b\[[\d;]*m)*")


class WithoutEmptyRows:
    """The standard output, less the empty rows that tyro writes below a text which fills its last line exactly."""

    def __init__(self) -> None:
        self._out, self._begun = sys.stdout, ""

    def write(self, text: str) -> int:
        """Write the lines that are complete, without empty rows."""
        *lines, self._begun = (self._begun + text).split("\n")
        self._out.writelines(f"{line}\n" for line in lines if not _EMPTY_ROW.fullmatch(line))
        return len(text)

    def flush(self) -> None:
        """Write what has been begun, too."""
        self._out.write(self._begun)
        self._out.flush()
        self._begun = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def with_plain_help(command: type[Any]) -> type[Any]:
    """A dataclass that parses like `command`, and whose help is easier to read.

    An option that may be left out has the type `X | None`, and tyro shows None among its values and as its default.
    Both are hidden here, because the option's own text says what happens without it. Defaults of flags are hidden too,
    and positional arguments are shown by name.
    """
    hints = get_type_hints(command, include_extras=True)
    options: list[tuple[str, Any, Any]] = []
    for option in fields(command):
        hint = hints[option.name]
        default = field() if option.default is MISSING else field(default=option.default)
        options.append((option.name, Annotated[hint, _shown(option.name, hint, option.default)], default))
    namespace = {"__doc__": command.__doc__}
    return make_dataclass(command.__name__, options, bases=(command,), namespace=namespace, frozen=True)


def _shown(name: str, hint: Any, default: object) -> Any:
    """How tyro's help shows one option."""
    hint, metadata = split_hint(hint)
    metavar, several = None, get_origin(hint) is tuple
    if POSITIONAL in metadata:
        metavar = f"{name.upper()} ..." if several else name.upper()
        metavar = f"[{metavar}]" if default is None else metavar
    elif default is None:
        (kind,) = (each for each in get_args(hint) if each is not NoneType)
        metavar = f"{{{','.join(get_args(kind))}}}" if get_origin(kind) is Literal else _METAVARS[kind]
    # An empty hint hides the default; with None, tyro writes its own.
    return arg(metavar=metavar, help_behavior_hint="" if default is None or default is False or several else None)
