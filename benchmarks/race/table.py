# SPDX-License-Identifier: Apache-2.0
"""The table of a link: what a step costs, how many it takes to the target, and the loss at equal cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.race.racers import BUDGET, LATER_LOCAL, LOCALS, SIZES, Racer, ddp_of, named, of_task
from benchmarks.race.results import curve_of, final, loss_until, result, steps_to, targets
from reproductions.shared.committed import Fields
from thinwire.lab.report.statistics import Spread, spread

NOT_RUN = "not run"
# An eighth of what DDP sends in the budget.
BYTES_SHARE = 8


@dataclass(frozen=True)
class Row:
    """One racer on one link. Seconds and bytes are those of a step; None is what has not been run.

    Attributes:
        racer: whose row it is.
        seconds: median over blocks.
        blocks: those of each block.
        start: what its first steps take beyond these seconds, all together; None where that is not known.
        exposed: the step less the wall's.
        of_wall: the speed of a step beside the wall's.
        payload: bytes that a worker sends.
        wire: bytes of its interface; None where there is no link.
        memory: peak of a worker's process, in bytes.
        copies: what that is more than without communication, in copies of the parameters.
        cpu: seconds of a worker's processor.
        steps: to the held-out target, by seed; infinite where it was not reached. These and all losses are those of
            4 workers, and there are none for other numbers.
        training_steps: to the training target.
        final: held-out loss at equal steps, by seed.
        equal_bytes: at equal bytes.
        equal_seconds: at equal seconds.
        failed: why it could not be timed.
        curve_failed: why a curve could not be run.
    """

    racer: Racer
    seconds: float | None = None
    blocks: tuple[float, ...] = ()
    start: float | None = 0.0
    exposed: float | None = None
    of_wall: float | None = None
    payload: float | None = None
    wire: float | None = None
    memory: float | None = None
    copies: float | None = None
    cpu: float | None = None
    steps: tuple[float, ...] = ()
    training_steps: tuple[float, ...] = ()
    final: tuple[float, ...] = ()
    equal_bytes: tuple[float, ...] = ()
    equal_seconds: tuple[float, ...] = ()
    failed: str | None = None
    curve_failed: str | None = None

    def seconds_to(self, steps: Sequence[float]) -> Spread | None:
        """Steps times seconds, and what the first ones take beyond that."""
        if self.seconds is None or self.start is None:
            return None
        return spread(count * self.seconds + self.start for count in steps) if steps else None

    @property
    def to_target(self) -> float:
        """Seconds to the held-out target, to sort by; infinite where they are not known."""
        found = self.seconds_to(self.steps)
        return float("inf") if found is None else found.median


def rows(link: str, workers: int, task: str = "text") -> list[Row]:
    """A row for each racer of a task, from the least time to the target."""
    walls = {racer: _times(racer, link, workers) for racer in (LOCALS[task], LATER_LOCAL)}
    found = [_row(racer, link, workers, walls[_wall_of(racer)]) for racer in of_task(task)]
    return sorted(found, key=lambda row: (row.to_target, row.seconds or float("inf")))


def first(found: Sequence[Row]) -> Row | None:
    """The one that is first at the target; None where none is known to reach it."""
    known = [row for row in found if row.to_target < float("inf")]
    return min(known, key=lambda row: row.to_target, default=None)


def _wall_of(racer: Racer) -> Racer:
    return LOCALS[racer.task] if racer.headline or racer.task != LATER_LOCAL.task else LATER_LOCAL


def _times(racer: Racer, link: str, workers: int) -> Fields | None:
    return result(f"times/{link}-{workers}-{racer.name}")


def _row(racer: Racer, link: str, workers: int, wall: Fields | None) -> Row:
    times = _times(racer, link, workers)
    figures: dict[str, Any] = {}
    if times is not None and "failed" in times:
        figures["failed"] = times["failed"]
    elif times is not None:
        figures = _of_times(racer, times, wall)
        figures["start"] = _start(racer, link, workers, figures["seconds"])
    if workers != SIZES[0]:
        return Row(racer, **figures)
    limit = median(wall["block_seconds"]) * BUDGET if wall is not None and "failed" not in wall else None
    return Row(racer, **figures, **_of_curves(racer, figures.get("seconds"), figures.get("start"), limit))


def _start(racer: Racer, link: str, workers: int, seconds: float) -> float | None:
    """What the steps that send all gradients take beyond the others."""
    if racer.dense_as is None:
        return 0.0
    dense = _times(named(racer.dense_as), link, workers)
    if dense is None or "failed" in dense:
        return None
    return racer.dense_steps * (median(dense["block_seconds"]) - seconds)


def _of_times(racer: Racer, times: Fields, wall: Fields | None) -> dict[str, Any]:
    seconds = median(times["block_seconds"])
    sent, wire = times["payload_bytes_of_run"], times["wire_bytes_per_worker_per_step"]
    found: dict[str, Any] = {
        "seconds": seconds,
        "blocks": tuple(times["block_seconds"]),
        "payload": times["payload_bytes_per_step"],
        # The counters are of the whole run, and the payload of the timed blocks.
        "wire": None if not wire or not sent else times["payload_bytes_per_step"] * wire * times["steps"] / sent,
        "memory": times["peak_memory_bytes"],
        "cpu": times["cpu_seconds_per_worker_per_step"],
    }
    if wall is not None and "failed" not in wall:
        free = median(wall["block_seconds"])
        found |= {
            "exposed": seconds - free,
            "of_wall": free / seconds,
            "copies": (times["peak_memory_bytes"] - wall["peak_memory_bytes"]) / racer.work.bytes,
        }
    return found


def _of_curves(racer: Racer, seconds: float | None, start: float | None, limit: float | None) -> dict[str, Any]:
    # Of racers whose curves are others', all seeds that these have.
    run = [(seed, each) for seed in racer.curve_of.seeds if (each := curve_of(racer, seed)) is not None]
    every = [(seed, each) for seed, each in run if "failed" not in each]
    failures = [each["failed"] for _, each in run if "failed" in each]
    curves = [
        (each, goals, _bytes_allowed(racer.task, seed))
        for seed, each in every
        if (goals := targets(racer.task, seed)) is not None
    ]
    found: dict[str, Any] = {"curve_failed": failures[0]} if failures else {}
    if not curves:
        return found
    found |= {
        "steps": tuple(float(steps_to(each, goals["losses"]) or "inf") for each, goals, _ in curves),
        "training_steps": tuple(
            float(steps_to(each, goals["training"], "training") or "inf") for each, goals, _ in curves
        ),
        "final": tuple(final(each) for each, _, _ in curves),
        "equal_bytes": _known(loss_until(each, each["payload_bytes"], allowed) for each, _, allowed in curves),
    }
    if seconds is not None and start is not None and limit is not None:
        found["equal_seconds"] = _known(
            loss_until(each, [step * seconds + start for step in each["steps"]], limit) for each, _, _ in curves
        )
    return found


def _known(values: Any) -> tuple[float, ...]:
    return tuple(value for value in values if value is not None)


def _bytes_allowed(task: str, seed: int) -> float:
    found = curve_of(ddp_of(task), seed)
    assert found is not None
    return (found["payload_bytes"] or [0.0])[-1] / BYTES_SHARE  # DDP ends with the budget


# -- as Markdown -------------------------------------------------------------------------------------------------------


def _cell(value: float | None, form: Callable[[float], str]) -> str:
    return NOT_RUN if value is None else form(value)


def _spread(found: Spread | None, form: str) -> str:
    if found is None:
        return NOT_RUN
    if found.median == float("inf"):
        return "not reached"
    return format(found.median, form) if found.low == found.high else found.words(form).replace("inf", "–")


def _of(values: Sequence[float], form: str) -> str:
    return _spread(spread(values) if values else None, form)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.2f}"


COLUMNS: dict[str, Callable[[Row, Row], str]] = {
    "seconds to the held-out target": lambda row, _: _spread(row.seconds_to(row.steps), ".0f"),
    "DDP's over these": lambda row, ddp: _over(ddp, row),
    "steps": lambda row, _: _of(row.steps, ".0f"),
    "seconds to the training target": lambda row, _: _spread(row.seconds_to(row.training_steps), ".0f"),
    "seconds a step": lambda row, _: _of(row.blocks, ".3f"),
    "speed relative to `Local()`": lambda row, _: _cell(row.of_wall, "{:.0%}".format),
    "exposed seconds a step": lambda row, _: _cell(row.exposed, "{:.3f}".format),
    "payload, MB a step": lambda row, _: _cell(row.payload, _megabytes),
    # Without a link nothing counts them.
    "on the wire, MB a step": lambda row, _: "–" if row.wire is None else _megabytes(row.wire),
    "CPU seconds a step": lambda row, _: _cell(row.cpu, "{:.3f}".format),
    "peak memory, MB": lambda row, _: _cell(row.memory, lambda value: f"{value / 1e6:.0f}"),
    "more copies of the parameters": lambda row, _: _cell(row.copies, "{:.1f}".format),
    "loss at equal steps": lambda row, _: _of(row.final, ".3f"),
    "at equal bytes": lambda row, _: _of(row.equal_bytes, ".3f"),
    "at equal seconds": lambda row, _: _of(row.equal_seconds, ".3f"),
}
SPEED = tuple(COLUMNS)[:7]
COST = tuple(COLUMNS)[7:]
# Of a step, whatever it learns.
STEP = tuple(COLUMNS)[4:12]


def _over(ddp: Row, row: Row) -> str:
    if float("inf") in (ddp.to_target, row.to_target):
        return "" if ddp.racer is not row.racer else NOT_RUN
    return f"{ddp.to_target / row.to_target:.2f}"


def wall_seconds(link: str, workers: int, task: str = "text") -> float | None:
    """Of a step without communication, as it was when a link was timed; None where it was not."""
    wall = _times(LOCALS[task], link, workers)
    return None if wall is None or "failed" in wall else median(wall["block_seconds"])


def table(link: str, workers: int, columns: Sequence[str] = tuple(COLUMNS), *, task: str = "text") -> str:
    """The rows of a link, as Markdown; racers of which nothing has been run are told below it."""
    found = rows(link, workers, task)
    ddp = next(row for row in found if row.racer is ddp_of(task))
    there = [row for row in found if row.seconds is not None]
    if not there:
        return f"{NOT_RUN.capitalize()}.\n"
    lines = [f"| | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for row in there:
        cells = [COLUMNS[name](row, ddp) for name in columns]
        lines.append(f"| {row.racer.name} ({row.racer.whose}) | {' | '.join(cells)} |")
    wall = _row(LOCALS[task], link, workers, _times(LOCALS[task], link, workers))
    if wall.seconds is not None:
        cells = [COLUMNS[name](wall, ddp) if name in STEP else "" for name in columns]
        lines.append(f"| `Local()`: nothing is sent | {' | '.join(cells)} |")
    raced = [row for row in found if row.racer.races_at(link, workers)]
    absent = [row.racer.name for row in raced if row.seconds is None and row.failed is None]
    failed = [f"{row.racer.name} failed: {row.failed}" for row in found if row.failed is not None]
    failed += [f"A curve of {row.racer.name} failed: {row.curve_failed}" for row in found if row.curve_failed]
    notes = [f"Not run: {', '.join(absent)}."] * bool(absent) + [f"{each}." for each in failed]
    return "\n".join(lines) + "\n" + "".join(f"\n{note}\n" for note in notes)
