# SPDX-License-Identifier: Apache-2.0
"""`thinwire watch`: a run while it trains, read from its folder or its bucket."""

from __future__ import annotations

import time
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli.console import out, print_json
from thinwire.errors import ConfigError
from thinwire.planning.units import nbytes, score, seconds, share, times, workers

if TYPE_CHECKING:
    from rich.table import Table

    from thinwire.lab.runs import Status
    from thinwire.lab.runs.live import Member

_MOST_NAMED = 8
_UNFINISHED = ("waiting", "running")
_BECAUSE = {
    "data": "reading batches takes longer than on the others",
    "compute": "computing takes longer than on the others",
}


@dataclass(frozen=True)
class Watch:
    """Show a run while it trains: progress, loss, bytes, waits, members, and the slowest worker.

    Example: thinwire watch runs/text-LocalSGD-20260101-120000

    A run over a bucket can be watched from any machine that has the run key as THINWIRE_KEY: thinwire watch
    s3://bucket/run. Its workers report every few seconds, with their heartbeats.

    The display is updated in place until the run ends. Where the output is no terminal, one line is printed for each
    change.

    Args:
        run: the run's folder, or that of a comparison, whose newest run is shown; or the URL of a run over a bucket.
        every: seconds between two updates.
        once: show the current state and exit.
        json: print one line of JSON for each change.
    """

    run: str
    _: KW_ONLY
    every: float = 2.0
    once: bool = False
    json: bool = False

    def __call__(self) -> int:
        """Show the run until it ends; returns 0, or 1 where it has diverged."""
        from thinwire.lab.runs import bucket_status, status

        if not self.every >= 0.1:
            raise ConfigError(f"--every {self.every:g} is invalid: it must be at least 0.1 seconds. Use --every 2")
        look = bucket_status(self.run) if "://" in self.run else lambda: status(Path(self.run))
        found = look()
        if self.once:
            self._print(found, whole=True)
        elif out.is_terminal and not self.json:
            from rich.live import Live

            with Live(table(found), console=out, auto_refresh=False) as live:
                while found.state in _UNFINISHED:
                    time.sleep(self.every)
                    found = look()
                    live.update(table(found), refresh=True)
        else:
            self._print(found)
            while found.state in _UNFINISHED:
                time.sleep(self.every)
                before, found = found, look()
                if replace(before, written_seconds_ago=0.0) != replace(found, written_seconds_ago=0.0):
                    self._print(found)
        return 1 if found.state == "diverged" else 0

    def _print(self, found: Status, *, whole: bool = False) -> None:
        if self.json:
            print_json(found)
        elif whole:
            out.print(table(found))
        else:
            words = dict(facts(found))
            late = [f"{each.late}: {each.name}" for each in found.workers if each.late]
            out.print(", ".join([found.state, *(f"{name} {words[name]}" for name in ("step", "loss", "sent")), *late]))


def table(found: Status) -> Table:
    """Return the state of a run as a table of names and words."""
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    for name, words in (("run", found.folder), ("strategy", found.strategy), *facts(found)):
        shown.add_row(name, Text(words))
    return shown


def facts(found: Status) -> list[tuple[str, str]]:
    """Return the state of a run in words, by name."""
    of_steps = "" if found.steps is None else f" of {found.steps}"
    pace = "" if found.seconds_per_step is None else f", {seconds(found.seconds_per_step)} a step"
    # Over a bucket only those losses are known that the loop passes to the worker.
    missing = "not recorded; worker.record_batch(loss=loss) does" if found.workers else "not recorded yet"
    losses = [missing if found.loss is None else score(found.loss)]
    losses += [] if found.eval_loss is None else [f"held-out {score(found.eval_loss)}"]
    sent = "nothing yet"
    if found.payload_bytes is not None and found.bytes_per_step is not None:
        sent = f"{nbytes(found.payload_bytes)} by each worker, {nbytes(found.bytes_per_step)} a step"
    rows = [
        *([("task", found.task)] if found.task else []),
        ("state", found.state + f", last change {seconds(found.written_seconds_ago)} ago" * (not found.workers)),
        ("step", f"{found.step}{of_steps}{pace}{_left(found)}"),
        ("loss", ", ".join(losses)),
        ("sent", sent),
    ]
    if found.wait_share is not None:
        reason = ", although no worker is slow: the links are" * (found.because == "wait")
        rows.append(("waits", f"{share(found.wait_share)} of a step{reason}"))
    if found.workers:
        rows += [(f"rank {rank}", _of_member(each)) for rank, each in enumerate(found.workers)]
    elif found.members:
        named = ", ".join(found.members[:_MOST_NAMED])
        more = f" and {len(found.members) - _MOST_NAMED} more" * (len(found.members) > _MOST_NAMED)
        rows.append(("members", f"{workers(len(found.members))}: {named}{more}"))
    if found.slowest is not None and found.slowdown is not None:
        why = _BECAUSE.get(found.because or "", "")
        rows.append(("slowest", f"worker {found.slowest}, busy {times(found.slowdown)} as long: {why}"))
    return rows


def _of_member(member: Member) -> str:
    late = {
        "awaited": "late: others wait for its message",
        "silent": "late: its heartbeat has stopped",
        "gone": "has left or ended",
    }
    words = [f"{member.name}: {member.rounds} rounds", f"step {member.step}"]
    words += [] if member.loss is None else [f"loss {score(member.loss)}"]
    words += [f"{nbytes(member.bytes_up)} up", f"{nbytes(member.bytes_down)} down"]
    return ", ".join([*words, late[member.late]] if member.late else words)


def _left(found: Status) -> str:
    """Return the time until the run ends, where its limit is known."""
    left = [
        (found.steps - found.step) * found.seconds_per_step
        if found.steps is not None and found.seconds_per_step is not None
        else None,
        None if found.limit_seconds is None else found.limit_seconds - found.seconds,
    ]
    known = [each for each in left if each is not None]
    return f", {seconds(max(0.0, min(known)))} left" if known and found.state == "running" else ""
