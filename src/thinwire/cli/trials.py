# SPDX-License-Identifier: Apache-2.0
"""The progress display of a sweep, and its table."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thinwire.cli.console import err, out

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.table import Table

    from thinwire.arrays.sweep.space import Hyperparameters
    from thinwire.arrays.sweep.sweeping import Progress

# Seconds between updates: of lines in a log, and of the table on a terminal.
_PLAIN_SECONDS = 10.0
_LIVE_SECONDS = 0.5
_SHOWN = 5  # trials in the live table


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


@contextmanager
def progress_display(trials: int, steps: int) -> Generator[Callable[[Progress], None]]:
    """Show a sweep's progress: a bar with the best trials on a terminal, a line every ten seconds elsewhere."""
    from rich.live import Live
    from rich.progress import Progress as ProgressBar
    from rich.table import Table

    bar = ProgressBar(console=err)
    task, shown_at = bar.add_task("sweep", total=trials * steps), time.monotonic()

    def update(progress: Progress) -> None:
        nonlocal shown_at
        text = f"array {progress.array}, {progress.members} trials, step {progress.step}/{steps}"
        waited = time.monotonic() - shown_at
        if not err.is_terminal:
            if waited > _PLAIN_SECONDS:
                err.print(f"{text}{_best(progress)}")
                shown_at = time.monotonic()
            return
        done = len(progress.ended) * steps + len(progress.current_losses()) * progress.step
        bar.update(task, completed=min(done, trials * steps), description=text)
        if waited > _LIVE_SECONDS:
            grid = Table.grid()
            grid.add_row(bar)
            grid.add_row(_live(progress))
            live.update(grid)
            shown_at = time.monotonic()

    with Live(bar, console=err, transient=True, refresh_per_second=4) as live:
        yield update


def _running(progress: Progress) -> list[tuple[int, float, Hyperparameters]]:
    """The trials of the current array with their last batch's loss, lowest loss first."""
    found = [(trial.number, loss, trial.hyperparameters) for trial, loss in progress.current_losses()]
    return sorted(found, key=lambda each: (not math.isfinite(each[1]), each[1]))


def _best(progress: Progress) -> str:
    from thinwire.arrays.sweep.trials import ranked

    if progress.ended:
        return f", best held-out loss {ranked(progress.ended)[0].loss:.4f}"
    running = _running(progress)[:1]
    return f", lowest loss of a batch {running[0][1]:.4f}" if running else ""


def _live(progress: Progress) -> Table:
    from rich.table import Table

    from thinwire.arrays.sweep.trials import ranked

    table = Table("trial", "loss", "of", "hyperparameters")
    for each in ranked(progress.ended)[:_SHOWN]:
        of = f"held-out data, {each.steps} steps{', stopped' if each.stopped else ''}"
        table.add_row(str(each.trial.number), f"{each.loss:.4f}", of, _text_of(each.trial.hyperparameters))
    for number, loss, hyperparameters in _running(progress)[:_SHOWN]:
        of = f"the last batch, {progress.step} steps"
        table.add_row(str(number), f"{loss:.4f}", of, _text_of(hyperparameters))
    return table


def _text_of(hyperparameters: Hyperparameters) -> str:
    from thinwire.arrays.sweep.results import short

    return ", ".join(f"{name} {short(value)}" for name, value in hyperparameters.items())
