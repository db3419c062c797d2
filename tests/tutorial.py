# SPDX-License-Identifier: Apache-2.0
"""Read a tutorial as a newcomer does: save its files, apply its diffs, run its commands, compare what they print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.test_docs import FENCE, text

_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Step:
    """One thing that the reader does, or sees."""

    kind: Literal["file", "diff", "command", "output"]
    body: str
    name: str = ""


def steps_of(page: Path) -> Iterator[Step]:
    """The steps of a page, in order."""
    for marked, language, body in FENCE.findall(text(page)):
        mark = marked.strip("<>!- \n")
        if mark.startswith("file: "):
            yield Step("file", body, mark.removeprefix("file: "))
        elif language == "diff":
            yield Step("diff", body)
        elif language == "sh":
            yield Step("command", body, "runs" if mark else "")
        elif language == "text":
            yield Step("output", body)


def patched(program: str, diff: str) -> str:
    """A program after a diff without line numbers; "..." stands for lines that stay.

    Raises:
        ValueError: a line of the diff is not where it should be.
    """
    lines, place, made = program.split("\n"), 0, list[str]()
    for hunk in re.split(r"^ \.\.\.$\n?", diff, flags=re.MULTILINE):
        rows = hunk.split("\n")[:-1] if hunk.endswith("\n") else hunk.split("\n")
        before = [row[1:] for row in rows if not row.startswith("+")]
        starts = [n for n in range(place, len(lines)) if lines[n : n + len(before)] == before]
        if not starts:
            raise ValueError(f"not in the program: {before}")
        made += lines[place : starts[0]]
        made += [row[1:] for row in rows if not row.startswith("-")]
        place = starts[0] + len(before)
    return "\n".join([*made, *lines[place:]])


def assert_printed(found: str, printed: str) -> None:
    """What was printed is what the page shows: the same words, and numbers within five percent of each other."""
    assert _NUMBER.sub("0", found.strip()) == _NUMBER.sub("0", printed.strip()), found
    for one, other in zip(_NUMBER.findall(found), _NUMBER.findall(printed), strict=True):
        assert abs(float(one) - float(other)) <= 0.05 * abs(float(other)), f"{found}\nis not\n{printed}"
