# SPDX-License-Identifier: Apache-2.0
"""The files of a report: JSON that is read, with errors that name the file, and files that are written whole."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from thinwire.core.storage.files import make_folder_of, write_atomically
from thinwire.errors import ConfigError

Facts = Mapping[str, object]
"""A JSON object, such as a run's summary or configuration."""


def number(facts: Facts, key: str) -> float | None:
    """Return the finite number under a key; None when it is absent, null, not a number, NaN or infinite.

    Example:
        >>> number({"loss": 2}, "loss"), number({"loss": "low"}, "loss"), number({}, "loss")
        (2.0, None, None)
    """
    value = facts.get(key)
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def text(facts: Facts, key: str, missing: str = "") -> str:
    """Return the text under a key, or `missing` when it is absent or null; a number is written as text."""
    value = facts.get(key)
    return missing if value is None else str(value)


def diverged(facts: Facts, key: str) -> bool:
    """Return True if the number under a key is NaN or infinite."""
    value = facts.get(key)
    return isinstance(value, float) and not math.isfinite(value)


def json_object(path: Path) -> Facts | None:
    """Return the object in a JSON file; None when there is no such file.

    Raises:
        ConfigError: the file cannot be read, is not valid JSON, or holds something other than an object.
    """
    content = _parsed(path)
    if content is None:
        return None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object. Write the run again")
    return content


def json_lines(path: Path) -> tuple[list[Facts] | None, list[str]]:
    """Return the objects in a file of one JSON object per line, with a note about lines that cannot be read.

    Such lines are left out, because a run that is killed may leave its last line half written.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path.is_file():
        return None, []
    lines = [line for line in _text(path).splitlines() if line.strip()]
    objects: list[Facts] = []
    for line in lines:
        try:
            entry: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            objects.append(entry)
    lost = len(lines) - len(objects)
    note = f"{lost} of the {len(lines)} lines of {path.name} cannot be read and are left out."
    return objects, [note] if lost else []


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file whole, into a folder that is made if needed, and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        make_folder_of(path)
        write_atomically(path, content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}). Use a folder you may write to") from None
    return path


def write_text(path: Path, content: str) -> Path:
    """Write a UTF-8 text file as `write_bytes` does, and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    return write_bytes(path, content.encode("utf-8", errors="replace"))


def _parsed(path: Path) -> object:
    if not path.is_file():
        return None
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}). It may have been cut short: write the run again, "
            "or remove the file to report without it"
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Make it readable") from None
