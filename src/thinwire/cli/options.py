# SPDX-License-Identifier: Apache-2.0
"""Options of several commands: settings as options, the command line as text, the default folder."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from thinwire.cli.parsing import OF_A_CALL
from thinwire.errors import ConfigError
from thinwire.lab.report.files import write_text
from thinwire.lab.runs.settings import CONFIG_FILE, Settings, as_toml, option_name


@dataclass(frozen=True)
class Options:
    """The base of a command whose options are fields of `Settings`; `settings_as_options` makes subclasses of it."""

    def given(self) -> dict[str, Any]:
        """Return the settings by name, None where an option was not given, and the command line."""
        names = {field.name for field in fields(self)}
        given = {field.name: getattr(self, field.name) for field in fields(Settings) if field.name in names}
        return {**given, "command": command_line()}


def settings_as_options(*, without: Sequence[str] = ()) -> type[Options]:
    """Make a dataclass with an option for each field of `Settings`, to be the base of a command.

    An option has the type and the help text of its field. Its default is None, which leaves the choice to `resolve`; a
    flag is off unless given.

    Args:
        without: fields that the command has no options for; it never has one for `command`.
    """
    options: list[tuple[str, Any, Any]] = []
    for name, kind in get_type_hints(Settings).items():
        if name in (*without, "command"):
            continue
        if kind is bool:
            options.append((name, bool, False))
        else:
            # Settings hold text, for JSON; as an option it is a path.
            options.append((name, (Path if name == "data" else kind) | None, None))
    return make_dataclass(
        "Options", options, bases=(Options,), namespace={"__doc__": Settings.__doc__}, frozen=True, kw_only=True
    )


def save_config(folder: Path, command: type[Any], name: str, values: Mapping[str, Any]) -> None:
    """Write the options that a command runs with to its folder, for `--config`.

    Args:
        folder: of the run.
        command: the command's dataclass.
        name: the command's name.
        values: by the names of the fields; others than the command's options are left out.
    """
    known = [option_name(field.name) for field in fields(command) if field.name not in OF_A_CALL]
    chosen = {option_name(key): value for key, value in values.items() if option_name(key) in known}
    text = as_toml(chosen, head=f"thinwire {name} --config {CONFIG_FILE} repeats this run")
    write_text(folder / CONFIG_FILE, text)


def command_line() -> str:
    """Return this process's command line, quoted for a shell."""
    return shlex.join(["thinwire", *sys.argv[1:]])


def words_of(command: Any) -> list[str]:
    """Return the options of a command that are not at their defaults, as words of a command line."""
    words: list[str] = []
    for each in fields(command):
        value = getattr(command, each.name)
        if each.kw_only and value != each.default and not isinstance(value, tuple):
            written = [] if value is True else [f"{value:g}" if isinstance(value, float) else str(value)]
            words += [f"--{option_name(each.name)}", *written]
    return words


def default_folder(task: str, name: str) -> Path:
    """Return a folder for a run that does not exist yet, named by the task, the strategy and the time."""
    from thinwire.lab.report import labels

    stem = f"{task.replace(':', '-')}-{labels.as_folder(labels.name(name))}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = Path("runs") / stem, 2
    while path.exists():
        path, number = Path("runs") / f"{stem}-{number}", number + 1
    return path


def as_typed(recipe: str) -> str:
    """A recipe as it was typed, with usual spaces; its canonical form drops arguments that are at their defaults."""
    return re.sub(r"\s*,\s*", ", ", " ".join(recipe.split()))


def check_folder(folder: Path, argument: str, fix: str) -> None:
    """Refuse a folder that is not there.

    Args:
        folder: that should be there.
        argument: what was given, for the error.
        fix: what to give instead, for the error.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        raise ConfigError(f"{argument}: {'is a file, not a folder' if folder.exists() else 'no such folder'}. {fix}")


def check_saved(folder: Path, argument: str) -> None:
    """Refuse the folder of a run that has saved nothing.

    Raises:
        ConfigError: with the option that would have saved it.
    """
    from thinwire.lab.runs import RunFolder

    if not (folder / "settings.json").exists() or any(RunFolder(folder).checkpoints.glob("*")):
        return
    every = RunFolder(folder).settings().save_every
    if every is None:
        raise ConfigError(f"{argument}: this run was not saved. Train with --save-every N")
    raise ConfigError(f"{argument}: this run has saved nothing yet (--save-every {every}). Wait for it, or train again")
