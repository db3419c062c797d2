# SPDX-License-Identifier: Apache-2.0
"""Where commands write: results to the standard output, everything else to the standard error."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console


class Output(Console):
    """The standard output; text is printed unchanged, without markup such as `[bold]` and without emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, markup=False, **options)

    def table(self, title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table of text."""
        from rich.table import Table

        table = Table(title=title or None, title_justify="left")
        for heading in headings:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.print(table)

    def on_broken_pipe(self) -> NoReturn:
        """Raise the error to `thinwire.cli.main`; rich would end the program with the exit code of a failure."""
        raise BrokenPipeError


out = Output(soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False, markup=False)


def print_error(problem: object) -> None:
    """Print one message about what went wrong to the standard error."""
    err.print("thinwire:", style="bold red", end=" ")
    err.print(str(problem))


def print_json(value: object) -> None:
    """Print a result as one line of JSON: what `--json` does."""
    out.print(json.dumps(as_json(value)))


def as_json(value: Any) -> Any:
    """Return a value as JSON can have it: dataclasses as objects, paths as text, and null for NaN and infinity."""
    if is_dataclass(value) and not isinstance(value, type):
        return as_json(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
