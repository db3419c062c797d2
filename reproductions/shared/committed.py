# SPDX-License-Identifier: Apache-2.0
"""Committed results, and the pages that are written from them: those of the papers' claims and of the race."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from thinwire.core.storage.files import make_folder_of, write_atomically

Fields = dict[str, Any]


class Records:
    """Results by name, in JSONL files of one folder: a line has a result and its `name`.

    Args:
        folder: of the files. Names are unique over all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[int, dict[str, Fields]]] = {}

    def all(self) -> dict[str, Fields]:
        """Return every result, by name."""
        return {name: each for path in sorted(self.folder.glob("*.jsonl")) for name, each in self._of(path).items()}

    def get(self, name: str) -> Fields | None:
        """Return a result; None if it has not been made."""
        return next((found for path in self.folder.glob("*.jsonl") if (found := self._of(path).get(name))), None)

    def put(self, name: str, content: Fields, *, file: str) -> None:
        """Keep a result in `file`.jsonl, in place of an earlier one of that name."""
        path = self.folder / f"{file}.jsonl"
        every = {**(self._of(path) if path.exists() else {}), name: {"name": name, **content}}
        make_folder_of(path)
        write_atomically(path, "".join(json.dumps(every[each]) + "\n" for each in sorted(every)).encode())

    def _of(self, path: Path) -> dict[str, Fields]:
        # Another process may have added to the file.
        changed = path.stat().st_mtime_ns
        if self._read.get(path, (None,))[0] != changed:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            self._read[path] = changed, {line["name"]: line for line in lines}
        return self._read[path][1]


def filled(template: Path, parts: Mapping[str, str]) -> str:
    """Return a page: its template, whose `<!-- NAME -->` are replaced by parts."""
    text = template.read_text(encoding="utf-8")
    for name, words in parts.items():
        text = text.replace(f"<!-- {name} -->", words)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def write_pages(pages: Mapping[Path, Callable[[], str]], *, check: bool = False) -> int:
    """Write pages; with `check` write nothing, and return 1 if a page is not what would be written."""
    texts = {path: made() for path, made in pages.items()}
    if check:
        return int(any(path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        write_atomically(path, text.encode())
    return 0
