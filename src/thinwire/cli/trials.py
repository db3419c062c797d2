"""Trials of a sweep as people see them: while they train, in a table, and as JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from thinwire.cli.console import err, out

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.table import Table

    from thinwire.sweep.space import Hyperparameters, Space
    from thinwire.sweep.sweeping import News
    from thinwire.sweep.trials import Outcome

_PLAIN_SECONDS = 10.0
_LIVE_SECONDS = 0.5
_SHOWN = 5
Fields = dict[str, Any]


def lines_of(best: Sequence[Outcome]) -> list[Fields]:
    """Trials as JSON, as `trials.json` has them."""
    return [
        {
            "trial": each.trial.number,
            "loss": each.loss if math.isfinite(each.loss) else None,
            "metric": each.metric if math.isfinite(each.metric) else None,
            "steps": each.steps,
            "given_up": each.stopped,
            "hyperparameters": dict(each.trial.hyperparameters),
            "copies": [
                {"step": copy.step, "source": copy.source, "hyperparameters": dict(copy.hyperparameters)}
                for copy in each.copies
            ],
        }
        for each in best
    ]


def headings_of(space: Space) -> list[str]:
    """What `rows_of` has in its columns."""
    return ["trial", *space.domains, "held-out loss", "metric", "steps"]


def rows_of(space: Space, best: Sequence[Outcome]) -> list[list[str]]:
    """Trials as the rows of a table."""
    return [
        [
            str(each.trial.number),
            *(_short(each.trial.hyperparameters[name]) for name in space.domains),
            f"{each.loss:.4f}",
            f"{each.metric:.4f}",
            f"{each.steps}{', given up' if each.stopped else ''}{_lineage(each)}",
        ]
        for each in best
    ]


def _lineage(outcome: Outcome) -> str:
    words = [f"of {copy.source} at {copy.step}" for copy in outcome.copies]
    return f", copy {', '.join(words)}" if words else ""


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table(*headings, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def words_of(summary: Fields) -> str:
    """A sweep's summary in a line or two."""
    words = [f"{summary['seconds']:.1f} s, {summary['given_up']} given up, {summary['diverged']} diverged"]
    if "alone_seconds" in summary:
        same = "the same best trial" if summary["same_best"] else "another best trial"
        words.append(
            f"one after another {summary['alone_seconds']:.1f} s, {summary['times_as_fast']:.1f} times as long; "
            f"{same}, losses at most {summary['largest_difference']:.1e} apart"
        )
    return "\n".join(words)


@contextmanager
def watched(trials: int, steps: int) -> Generator[Callable[[News], None]]:
    """A live bar and the best trials on a terminal, a line every ten seconds elsewhere."""
    from rich.live import Live
    from rich.progress import Progress
    from rich.table import Table

    bar = Progress(console=err)
    place, told = bar.add_task("sweep", total=trials * steps), [time.monotonic()]

    def seen(news: News) -> None:
        words = f"array {news.array}, {news.members} trials, step {news.step}/{steps}"
        waited = time.monotonic() - told[0]
        if not err.is_terminal and waited > _PLAIN_SECONDS:
            err.print(f"{words}{_best(news)}", markup=False)
            told[0] = time.monotonic()
        if not err.is_terminal:
            return
        done = len(news.ended) * steps + len(news.running()) * news.step
        bar.update(place, completed=min(done, trials * steps), description=words)
        if waited > _LIVE_SECONDS:
            grid = Table.grid()
            grid.add_row(bar)
            grid.add_row(_live(news))
            live.update(grid)
            told[0] = time.monotonic()

    with Live(bar, console=err, transient=True, refresh_per_second=4) as live:
        yield seen


def _running(news: News) -> list[tuple[int, float, Hyperparameters]]:
    """Trials under way with their last batch's loss, the lowest first."""
    found = [(trial.number, loss, trial.hyperparameters) for trial, loss in news.running()]
    return sorted(found, key=lambda each: (not math.isfinite(each[1]), each[1]))


def _best(news: News) -> str:
    from thinwire.sweep.trials import ranked

    if news.ended:
        return f", best held-out loss {ranked(news.ended)[0].loss:.4f}"
    running = _running(news)[:1]
    return f", lowest loss of a batch {running[0][1]:.4f}" if running else ""


def _live(news: News) -> Table:
    from rich.table import Table

    from thinwire.sweep.trials import ranked

    table = Table("trial", "loss", "of", "hyperparameters")
    for each in ranked(news.ended)[:_SHOWN]:
        of = f"held-out data, {each.steps} steps{', given up' if each.stopped else ''}"
        table.add_row(str(each.trial.number), f"{each.loss:.4f}", of, _knobs(each.trial.hyperparameters))
    for number, loss, hyperparameters in _running(news)[:_SHOWN]:
        table.add_row(str(number), f"{loss:.4f}", f"the last batch, {news.step} steps", _knobs(hyperparameters))
    return table


def _knobs(hyperparameters: Hyperparameters) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in hyperparameters.items())
