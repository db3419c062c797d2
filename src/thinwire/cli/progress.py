# SPDX-License-Identifier: Apache-2.0
"""The progress of a run: a live line on a terminal, one plain line every ten seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from thinwire.cli.console import Output, err, out
from thinwire.planning.units import workers

if TYPE_CHECKING:
    from rich.progress import Progress

_PLAIN_SECONDS = 10.0
_WIDE = 200
_CHOSEN = ("bits", "kept", "fraction", "rank", "period")
"""What a budget of bytes may choose."""
# Events of a run and summaries, as they come from JSON.
Fields = dict[str, Any]


class Bar:
    """A context with a bar on a terminal; elsewhere it prints a line every ten seconds.

    Args:
        label: the text before the bar, and before a line.
        console: where to write.
    """

    def __init__(self, label: str, *, console: Console = err) -> None:
        self._label = label
        self._console = console
        self._live: Progress | None = None
        self._printed_at = time.monotonic()

    def __enter__(self) -> Self:
        """Start the bar, on a terminal."""
        if self._console.is_terminal:
            # Imported here, because `thinwire train --help` would wait for it.
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            before, after = (TextColumn(f"{{task.{x}}}", markup=False) for x in ("description", "fields[words]"))
            columns = (before, BarColumn(24), TimeElapsedColumn(), after)
            self._live = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
            self._live.start()
            self._task = self._live.add_task(self._label, total=None, words="")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._live is not None:
            self._live.stop()

    def show(self, *, words: str = "", **changes: Any) -> None:
        """Change what the bar shows: `words`, the text behind it, `completed`, `total` or `description`."""
        if self._live is not None:
            self._live.update(self._task, words=words, **changes)
        elif words and time.monotonic() - self._printed_at >= _PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            self._console.print(f"{self._label}: {words}")


class Watch(Bar):
    """A context that shows the events of one run on the standard error.

    Args:
        label: what is being trained.
        steps: the step at which the run ends, if it has a limit of steps.
        seconds: its budget of training time, if it has one.
        console: where to write.
    """

    def __init__(self, label: str, steps: int | None, seconds: float | None, *, console: Console = err) -> None:
        super().__init__(label, console=console)
        self._steps = steps
        self._seconds = seconds
        self._step: Fields = {}
        self._evaluation: Fields = {}
        self._workers = 0  # of an elastic run

    def __call__(self, event: Fields) -> None:
        """Show one event of the run."""
        if event["event"] == "step":
            self._step = event
        elif event["event"] == "evaluation":
            self._evaluation = event
        elif event["event"] == "view":
            self._workers = len(event["members"])
            if event["epoch"]:
                self._console.print(f"{self._label}: {view_in_words(event)}")
        elif event["event"] == "restart":
            self._console.print(f"{self._label}: {restart_in_words(event)}")
        elif event["event"] == "notice":
            self._console.print(f"{self._label}: saved after {notice_in_words(event)}")
        self.show(completed=self._done(), total=1.0, words=self._words())

    def _done(self) -> float:
        """Return the fraction of the run that is over; 0 where it has no limit of steps or seconds."""
        shares = [0.0]
        if self._steps and self._step:
            shares.append(self._step["step"] / self._steps)
        if self._seconds and self._step:
            shares.append(self._step["seconds"] / self._seconds)
        return min(1.0, max(shares))

    def _words(self) -> str:
        if not self._step:
            return "step 0"
        step, done = self._step, self._done()
        words = [
            f"step {step['step']}{f'/{self._steps}' if self._steps else ''}",
            f"loss {step['loss']:.3f}",
            f"{1e3 * step['seconds'] / step['step']:.0f} ms/step",
            f"{step['payload_bytes'] / 1e6:.1f} MB sent",
        ]
        if self._workers:
            words.insert(1, workers(self._workers))
        if self._evaluation:
            words.insert(2, f"held-out {self._evaluation['eval_loss']:.3f}")
        words += budget_in_words(step.get("metrics", {}))
        if done > 0:
            left = int(step["seconds"] * (1 - done) / done)
            words.append(f"{left // 60}:{left % 60:02d} left")
        return ", ".join(words)


class Parts(Bar):
    """A context that shows which part of a command is under way: a bar on a terminal, one line elsewhere."""

    _done = -1  # the first part is not done when it is shown

    def __enter__(self) -> Self:
        """Start the bar, or print the line."""
        if not self._console.is_terminal:
            self._console.print(self._label)
        return super().__enter__()

    def expect(self, total: int | None) -> None:
        """Count parts from here, of which there are so many; None if that is not known."""
        self._done = -1
        self.show(total=total, completed=0)

    def __call__(self, what: str) -> None:
        """Show the part that begins."""
        self._done += 1
        self.show(completed=self._done, description=what)


def budget_in_words(metrics: Fields) -> list[str]:
    """Return what a budget of bytes has chosen, such as `["bits 3", "97 % of the budget"]`; empty without one."""
    used = metrics.get("budget_used")
    if used is None:
        return []
    chosen = [f"{name} {metrics[name]:.3g}" for name in _CHOSEN if name in metrics]
    return [*chosen, f"{100 * used:.0f} % of the budget"]


def notice_in_words(notice: Fields) -> str:
    """After which step, and why, such as `step 40, as rank 1 got SIGUSR1`."""
    reasons = " and ".join(f"rank {rank} got {reason}" for rank, reason in notice["reasons"].items())
    return f"step {notice['step']}, as {reasons}"


def restart_in_words(event: Fields) -> str:
    """Such as `worker 1 was ended by SIGKILL; it is started again in 1 s, and 2 more restarts are left`."""
    if event["after"] is None:
        return f"{event['how']}; it is not started again, as no more restarts are left"
    left = {0: "no more restarts are", 1: "1 more restart is"}.get(event["left"], f"{event['left']} more restarts are")
    return f"{event['how']}; it is started again in {event['after']:g} s, and {left} left"


def view_in_words(view: Fields) -> str:
    """Describe a new view, such as `step 8: 2 workers continue, without 0-5e1f0b7c`."""
    count = len(view["members"])
    gone = [*view["lost"], *(f"{worker}, which left with {reason}" for worker, reason in view["left"].items())]
    lost = f", without {', '.join(gone)}" if gone else ""
    joined = f", with {', '.join(view['joined'])}" if view["joined"] else ""
    return f"step {view['step']}: {count} {'worker continues' if count == 1 else 'workers continue'}{lost}{joined}"


def show_summaries(summaries: Sequence[Fields]) -> None:
    """Print summaries as a table: one line per run if several fit the width, otherwise one line per figure."""
    from rich.table import Table

    from thinwire.lab.report import rich_table, rows

    console = Output(width=None if out.is_terminal else _WIDE)
    lines = rows(summaries)
    widths = [max(len(heading), *(len(line[heading]) for line in lines)) + 3 for heading in lines[0]]
    if len(lines) > 1 and sum(widths) < console.width:
        console.print(rich_table(summaries))
        return
    table = Table("", show_header=len(lines) > 1)
    for line in lines:
        table.add_column(line["strategy"], justify="right", overflow="fold")
    for heading in lines[0] if len(lines) == 1 else list(lines[0])[1:]:
        table.add_row(heading, *(line[heading] for line in lines))
    console.print(table)
