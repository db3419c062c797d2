# SPDX-License-Identifier: Apache-2.0
"""The race's pictures: loss against seconds and against bytes, and the speed-up over DDP by link."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.race.racers import PLACES, SEEDS, ddp_of, of_task
from benchmarks.race.results import curve_of
from benchmarks.race.table import Row, rows
from thinwire.lab.report.palette import MUTED, Look, looks
from thinwire.lab.report.picture import FONT_SIZE, Label, canvas, label, plain, write_svg

PLACE = Path(__file__).parents[2] / "docs" / "_static"
SPEEDS = {"20mbit": 20e6, "100mbit": 100e6, "1gbit": 1e9}
_LEAST_LOSS_SHOWN = 3.2
_NAMED = 7
"""So many lines have colors and names; the others are thin and gray."""


def draw_all(workers: int = 4) -> list[Path]:
    """Draw what can be drawn of the results; returns the files."""
    made: list[Path] = []
    for task, link, size in PLACES:
        found = [row for row in rows(link, size, task) if row.seconds is not None and curve_of(row.racer, SEEDS[0])]
        if len(found) > 1 and size == workers:
            prefix = "race-" if task == "text" else f"race-{task}-"
            figure = _curves(found, f"{link}, {workers} workers")
            made.append(write_svg(figure, PLACE / f"{prefix}{link.replace('+', '-')}-{workers}.svg"))
    ratios = _ratios(workers)
    if len({link for points in ratios.values() for link in points}) > 1:
        made.append(write_svg(_speed_up(ratios, workers), PLACE / f"race-speed-up-{workers}.svg"))
    return made


def _named(names: Sequence[str], others: Sequence[str], ddp: str) -> dict[str, Look]:
    """The looks of those that are named: the first ones, DDP, and the first of the others' methods."""
    chosen = [*names[: _NAMED - 2], ddp, *others[:1]]
    chosen += [name for name in names if name not in chosen][: _NAMED - len(set(chosen))]
    chosen = [name for name in names if name in chosen]
    return dict(zip(chosen, looks(["ddp" if name == ddp else name for name in chosen]), strict=True))


def _curves(found: Sequence[Row], title: str) -> Figure:
    """Curves in the order of their seconds to the target."""
    figure = canvas(10.8, 4.6)
    figure.suptitle(f"{title}; dashed: not thinwire's; gray: the others", fontsize=FONT_SIZE + 1, color=MUTED.light)
    left, right = figure.subplots(1, 2, sharey=True)
    others = [row.racer.name for row in found if row.racer.whose != "thinwire"]
    ddp = ddp_of(found[0].racer.task).name
    named = _named([row.racer.name for row in found], [name for name in others if name != ddp], ddp)
    for axes, unit in ((left, "seconds"), (right, "megabytes sent by a worker")):
        plain(axes, x=unit, y="held-out loss, nats" if axes is left else "")
        ends: list[Label] = []
        for row in reversed(found):
            curve = curve_of(row.racer, SEEDS[0])
            assert curve is not None
            seconds = [step * (row.seconds or 0) + (row.start or 0) for step in curve["steps"]]
            across = seconds if axes is left else [each / 1e6 for each in curve["payload_bytes"]]
            losses, look = curve["losses"], named.get(row.racer.name)
            _line(axes, across, losses, look, dashed=row.racer.whose != "thinwire")
            if look is not None:
                ends.append(Label(row.racer.name, across[-1], losses[-1], look.tone.light))
        axes.set_xscale("log")
        _plain_log(axes)
        if found[0].racer.task == "text":
            axes.set_ylim(top=_LEAST_LOSS_SHOWN)
        label(axes, ends[::-1])
    return figure


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look | None, *, dashed: bool) -> None:
    """A named line in its color, the others thin and gray; dashed if it is not thinwire's."""
    color, width = (MUTED.light, 0.6) if look is None else (look.tone.light, 1.6)
    axes.plot(x, y, color=color, linewidth=width, linestyle="--" if dashed else "-", alpha=0.5 if look is None else 1)


def _plain_log(axes: Axes) -> None:
    """Numbers instead of powers of ten."""
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


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


def _speed_up(ratios: dict[str, dict[str, float]], workers: int) -> Figure:
    figure = canvas(8.4, 4.6)
    axes = figure.add_subplot()
    plain(axes, x="link, Mbit/s", y="DDP's seconds to the target over these")
    figure.suptitle(
        f"{workers} workers; below 1 DDP is sooner; dashed: not thinwire's; gray: the others",
        fontsize=FONT_SIZE + 1,
        color=MUTED.light,
    )
    whose = {racer.name: racer.whose for racer in of_task("text")}
    # The greatest factor on the slowest link comes first.
    names = sorted(ratios, key=lambda name: -max(ratios[name].values()))
    ddp = ddp_of("text").name
    named = _named(names, [name for name in names if whose[name] != "thinwire" and name != ddp], ddp)
    starts: list[Label] = []
    for name in reversed(names):
        places, values = [SPEEDS[link] / 1e6 for link in ratios[name]], list(ratios[name].values())
        _line(axes, places, values, named.get(name), dashed=whose[name] != "thinwire")
        if name in named:
            starts.append(Label(name, places[0], values[0], named[name].tone.light))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left=min(SPEEDS.values()) / 1e6 / 1.6)
    axes.set_xticks([speed / 1e6 for speed in SPEEDS.values()], [f"{speed / 1e6:g}" for speed in SPEEDS.values()])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    label(axes, starts[::-1])
    return figure
