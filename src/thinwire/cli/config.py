# SPDX-License-Identifier: Apache-2.0
"""`--config run.toml`: a file with a command's options; options on the command line override it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from thinwire.errors import ConfigError
from thinwire.lab.runs.configuration import NAME


def with_config(command: str, arguments: Sequence[str], options: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The arguments, with those of the file that `--config` names before them; `--no-FLAG` leaves out the file's flag.

    Args:
        command: the command's name, for errors.
        arguments: as given.
        options: the names of the command's options, without dashes in front.
        flags: those of them that take no value.

    Raises:
        ConfigError: the file cannot be read, or has a key that is no option of the command.

    Example:
        >>> with_config("train", ["--lr", "0.1"], ["lr", "steps"], [])
        ['--lr', '0.1']
    """
    path, rest = _taken(arguments)
    if path is None:
        return rest
    left_out = {f"--no-{flag}": flag for flag in flags}
    given = {left_out[word] for word in rest if word in left_out}
    rest = [word for word in rest if word not in left_out]
    given |= {word.partition("=")[0].removeprefix("--").replace("_", "-") for word in rest if word.startswith("--")}
    made: list[str] = []
    for key, value in read(path).items():
        name = key.replace("_", "-")
        if name not in options:
            close = [each for each in options if f"{name}-".startswith(f"{each}-")]
            close += get_close_matches(name, options, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]}?" if close else f"; thinwire {command} --help lists the options"
            raise ConfigError(f"{path}: {key!r} is no option of thinwire {command}{hint}")
        if name in given:
            continue
        if name in flags:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} = {value!r}: must be true or false")
            made += [f"--{name}"] * value
        else:
            made.append(f"--{name}={_text(path, key, value)}")
    return [*made, *rest]


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration, or of the one in a run's folder.

    Raises:
        ConfigError: there is none, or it is not TOML.
    """
    path = path / NAME if path.is_dir() else path
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"--config {path}: cannot be read ({error.strerror}). A run saves its own as {NAME} in its folder"
        ) from None
    except ValueError as error:
        raise ConfigError(
            f'--config {path}: is no TOML ({error}). Write lines like lr = 0.1 or task = "text"'
        ) from None


def _taken(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of `--config`, and the other arguments."""
    path, rest, words = None, list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name != "--config":
            rest.append(word)
            continue
        found = value if equals else next(words, "")
        if not found or path is not None:
            raise ConfigError("--config: needs one file, such as --config run.toml")
        path = Path(found)
    return path, rest


def _text(path: Path, key: str, value: object) -> str:
    """A value as on a command line; a list of recipes is one text."""
    if isinstance(value, list) and key == "strategies" and all(isinstance(each, str) for each in value):
        return "; ".join(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{path}: {key} = {value!r}: must be text or a number. The file has no sections and no lists")
    return value if isinstance(value, str) else repr(value)
