"""What the commands that train have in common: settings as options, the command line, the folder."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg

from thinwire.runs.settings import Settings


@dataclass(frozen=True)
class Options:
    """Options that are fields of `Settings`; those of a command are made by `settings_as_options`."""

    def asked(self) -> dict[str, Any]:
        """The settings by name, None where an option was not given, and the command line."""
        names = {field.name for field in fields(self)}
        asked = {field.name: getattr(self, field.name) for field in fields(Settings) if field.name in names}
        return {**asked, "command": command_line()}


def settings_as_options(*, without: Sequence[str]) -> type[Options]:
    """A dataclass with an option for each field of `Settings`, to be the base of a command.

    An option has the name (but --model-size for `model`), the type and the help text of its field. Its default is None,
    which leaves the choice to `resolve`; only a flag is off unless given.

    Args:
        without: fields that are no options of this command; `command` never is one.
    """
    options: list[tuple[str, Any, Any]] = []
    for name, kind in get_type_hints(Settings).items():
        if name in (*without, "command"):
            continue
        if kind is bool:
            options.append((name, bool, False))
        elif name == "model":
            options.append((name, Annotated[kind | None, arg(name="model-size")], None))
        else:
            options.append((name, (Path if name == "data" else kind) | None, None))
    return make_dataclass("Options", options, bases=(Options,), namespace={"__doc__": Settings.__doc__}, frozen=True)


def command_line() -> str:
    """This process's command line, as it can be given again."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def default_folder(task: str, name: str) -> Path:
    """A new folder for a run, by its task, its strategy and the time."""
    from thinwire.runs.comparison import short_name

    stem = f"{task}-{short_name(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path
