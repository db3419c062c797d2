# SPDX-License-Identifier: Apache-2.0
"""The race's pictures: loss against seconds and against bytes, and the speed-up over DDP by link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.race.racers import PLACES, RACERS, SEEDS, ddp_of, of_task
from benchmarks.race.results import Fields, curve_of
from benchmarks.race.table import Row, rows

PLACE = Path(__file__).parents[2] / "docs" / "_static"
SPEEDS = {"20mbit": 20e6, "100mbit": 100e6, "1gbit": 1e9}
_LEAST_LOSS_SHOWN = 3.2
_MOST_LINES = 16


def draw_all(workers: int = 4) -> list[Path]:
    """Draw what can be drawn of the results; returns the files."""
    made: list[Path] = []
    mpl.rcParams["svg.hashsalt"] = "race"  # so that equal results make equal files
    for task, link, size in PLACES:
        found = [row for row in rows(link, size, task) if row.seconds is not None and curve_of(row.racer, SEEDS[0])]
        if len(found) > _MOST_LINES:  # they are in the order of their seconds to the target
            found = found[: _MOST_LINES - 1] + [row for row in found[_MOST_LINES - 1 :] if row.racer is ddp_of(task)]
        if len(found) > 1 and size == workers:
            prefix = "race-" if task == "text" else f"race-{task}-"
            path = PLACE / f"{prefix}{link.replace('+', '-')}-{workers}.svg"
            made.append(_curves(found, link, path, workers))
    ratios = _ratios(workers)
    if len({link for points in ratios.values() for link in points}) > 1:
        made.append(_speed_up(ratios, workers))
    return made


def _curves(found: Sequence[Row], link: str, path: Path, workers: int) -> Path:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 4.2), sharey=True)
    axes: tuple[tuple[Any, str, Callable[[Row, Fields], list[float]]], ...] = (
        (left, "seconds", lambda row, curve: [step * (row.seconds or 0) + (row.start or 0) for step in curve["steps"]]),
        (right, "megabytes sent by a worker", lambda _, curve: [each / 1e6 for each in curve["payload_bytes"]]),
    )
    for axis, label, places in axes:
        for row, colour in zip(found, _colours(), strict=False):
            curve = curve_of(row.racer, SEEDS[0])
            assert curve is not None
            dashed = "-" if row.racer.whose == "thinwire" else "--"
            axis.plot(places(row, curve), curve["losses"], dashed, color=colour, label=row.racer.name, lw=1.3)
        axis.set_xscale("log")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    if found[0].racer.task == "text":
        left.set_ylim(top=_LEAST_LOSS_SHOWN)
    left.set_ylabel("held-out loss, nats")
    right.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.suptitle(f"{link}, {workers} workers; dashed: not thinwire's; at most {_MOST_LINES}, the soonest first")
    return _save(figure, path)


def _colours() -> Sequence[Any]:
    return [plt.get_cmap("tab20")(place) for place in range(20)] * 2


def _ratios(workers: int) -> dict[str, dict[str, float]]:
    """How much sooner than DDP each racer is at the target, by link."""
    ratios: dict[str, dict[str, float]] = {racer.name: {} for racer in of_task("text")}
    for link in SPEEDS:
        found = rows(link, workers)
        ddp = next(row for row in found if row.racer is ddp_of("text"))
        for row in found:
            if float("inf") not in (row.to_target, ddp.to_target):
                ratios[row.racer.name][link] = ddp.to_target / row.to_target
    return {name: points for name, points in ratios.items() if len(points) > 1}


def _speed_up(ratios: dict[str, dict[str, float]], workers: int) -> Path:
    figure, axis = plt.subplots(figsize=(8.5, 4.4))
    whose = {racer.name: racer.whose for racer in RACERS}
    for (name, points), colour in zip(ratios.items(), _colours(), strict=False):
        dashed = "o-" if whose[name] == "thinwire" else "o--"
        places = [SPEEDS[link] / 1e6 for link in points]
        axis.plot(places, list(points.values()), dashed, color=colour, label=name, lw=1.3, ms=3)
    axis.axhline(1.0, color="black", lw=0.8)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("link, Mbit/s")
    axis.set_ylabel("DDP's seconds to the target over these")
    axis.set_title(f"{workers} workers; below the line DDP is sooner")
    axis.grid(alpha=0.3, which="both")
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _save(figure, PLACE / f"race-speed-up-{workers}.svg")


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
