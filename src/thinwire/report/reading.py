"""JSON files, read with their failures named."""

import json
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.report.facts import Facts


def json_object(path: Path) -> Facts | None:
    """The object in a JSON file; None when there is no such file.

    Raises:
        ConfigError: the file cannot be read, is no JSON, or holds something other than an object.
    """
    content = _parsed(path)
    if content is None:
        return None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold a JSON object; write the run again")
    return content


def json_list(path: Path) -> list[Facts] | None:
    """The list of objects in a JSON file; None when there is no such file.

    Raises:
        ConfigError: the file cannot be read, is no JSON, or holds something other than a list of objects.
    """
    content = _parsed(path)
    if content is None:
        return None
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise ConfigError(f"{path}: must hold a JSON list of objects; write the run again")
    return content


def json_lines(path: Path) -> tuple[list[Facts] | None, list[str]]:
    """The objects in a file of one JSON object per line, with a note for the lines that are none.

    A run that is killed leaves its last line half written; the lines before it stay good.

    Raises:
        ConfigError: the file cannot be read.
    """
    if not path.is_file():
        return None, []
    lines = [line for line in _text(path).splitlines() if line.strip()]
    objects = [entry for line in lines if (entry := _object_in(line)) is not None]
    lost = len(lines) - len(objects)
    note = f"Left out, for it could not be read: {lost} of the {len(lines)} lines of {path.name}."
    return objects, [note] if lost else []


def _object_in(line: str) -> Facts | None:
    try:
        entry: object = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _parsed(path: Path) -> object:
    if not path.is_file():
        return None
    try:
        return json.loads(_text(path))
    except ValueError as error:
        raise ConfigError(
            f"{path}: not valid JSON ({error}); it may have been cut short: write the run again, "
            "or remove the file to report without it"
        ) from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
