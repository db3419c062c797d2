# SPDX-License-Identifier: Apache-2.0
"""The trade-off of a comparison: bytes against loss with the Pareto front, and figures of each strategy over seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

from thinwire.lab.report.files import Facts, number
from thinwire.lab.report.labels import shortened
from thinwire.lab.report.palette import GRID, INK, MUTED, PAPER, Look
from thinwire.lab.report.picture import Label, Picture, canvas, is_narrow, label, note, plain
from thinwire.lab.report.runs import Collection, Run
from thinwire.lab.report.statistics import Spread
from thinwire.planning import units

_PAYLOAD = "payload_bytes_per_worker_per_step"
# Bytes whose totals differ by more than this are drawn on a logarithmic axis.
_WIDE_RANGE = 8


def spread(run: Run, of: Callable[[Facts], float | None]) -> Spread | None:
    """Return a figure over a run's rounds; None where none of them has it."""
    rounds = run.rounds or (run.summary,)
    values = [value for facts in rounds if (value := of(facts)) is not None]
    return Spread(tuple(values), len(rounds)) if values else None


def sent(summary: Facts) -> float | None:
    """Return the payload that a worker sent in the whole run."""
    each, steps = number(summary, _PAYLOAD), number(summary, "steps")
    return None if each is None or steps is None else each * steps


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points that no other point beats in both, by rising first value; less is better in both.

    Example:
        >>> front([(1.0, 5.0), (2.0, 3.0), (3.0, 4.0)])
        [0, 1]
    """
    found: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not found or points[index][1] < points[found[-1]][1]:
            found.append(index)
    return found


def pareto_picture(collection: Collection, styles: Sequence[Look]) -> Picture | None:
    """Held-out loss against bytes sent, with the front and a bar for the seeds; None unless two runs have both."""
    rows: list[tuple[Run, Look, Spread, Spread]] = []
    for run, look in zip(collection.runs, styles, strict=True):
        loss = spread(run, lambda facts: number(facts, "eval_loss"))
        # Of the same seeds.
        payload = spread(run, lambda facts: None if number(facts, "eval_loss") is None else sent(facts))
        if payload is not None and loss is not None and math.isfinite(loss.mean):
            rows.append((run, look, payload, loss))
    if len(rows) < 2:
        return None
    figure = canvas(10.8, 4.1)
    axes = figure.add_subplot()
    plain(axes, x="payload bytes sent per worker in the run", y="held-out loss")
    points = [(payload.mean, loss.mean) for _, _, payload, loss in rows]
    best = front(points)
    corners = [points[index] for index in best]
    axes.step(*zip(*corners, strict=True), where="post", color=MUTED.light, linewidth=1.2, linestyle=(0, (4, 3)))
    for _, look, payload, loss in rows:
        _point(axes, look, payload, loss)
    sizes = [payload for payload, _ in points if payload > 0]
    if sizes and max(sizes) > _WIDE_RANGE * min(sizes) and len(sizes) == len(points):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=5))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.margins(x=0.18 if is_narrow() else 0.12, y=0.16)
    most = 20 if is_narrow() else 34
    label(axes, [Label(shortened(run.label, most), payload.mean, loss.mean) for run, _, payload, loss in rows])
    names = ", ".join(rows[index][0].label for index in best)
    several = any(len(loss.values) > 1 for *_, loss in rows)
    bars = " Bars reach one standard deviation over seeds." if several else ""
    bars += "".join(f" {run.label}: the mean of those that ended{loss.share}." for run, *_, loss in rows if loss.share)
    return Picture(
        name="pareto",
        figure=figure,
        title="Bytes against held-out loss",
        caption=_of_front(names, len(best)) + _of_steps([run for run, *_ in rows]) + bars,
        description=f"Scatter of held-out loss against payload. On the Pareto front: {names}.",
    )


def _of_front(names: str, count: int) -> str:
    if count == 1:
        return f"{names} sends least and has the lowest loss."
    return (
        "The dashed line is the Pareto front: no other strategy of this comparison sends less and has a lower loss "
        "than one on it."
    )


def _of_steps(runs: Sequence[Run]) -> str:
    steps = {number(run.summary, "steps") for run in runs}
    return " The runs have different numbers of steps." if len(steps) > 1 else ""


def _point(axes: Axes, look: Look, payload: Spread, loss: Spread) -> None:
    """A marker with its bars."""
    axes.errorbar(
        [payload.mean],
        [loss.mean],
        xerr=[payload.deviation] if payload.deviation else None,
        yerr=[loss.deviation] if loss.deviation else None,
        color=look.tone.light,
        marker=look.marker,
        markersize=9,
        markeredgecolor=PAPER.light,
        capsize=4,
        elinewidth=1.4,
        linestyle="none",
        zorder=4,
    )


@dataclass(frozen=True)
class Figure:
    """One figure to draw for each strategy: how to read it, and how to write it."""

    name: str
    title: str
    caption: str
    of: Callable[[Facts], float | None]
    unit: Callable[[float], str]
    from_zero: bool = True


FIGURES = (
    Figure(
        "time-to-target",
        "Time to the target loss",
        "Training time until the first evaluation whose held-out loss was no more than the target.",
        lambda facts: number(facts, "seconds_to_target"),
        units.seconds,
    ),
    Figure(
        "held-out-loss",
        "Held-out loss over seeds",
        "The mean, and one standard deviation over seeds; the small dots are the seeds.",
        lambda facts: number(facts, "eval_loss"),
        units.score,
        from_zero=False,
    ),
    Figure(
        "memory",
        "Peak memory of a worker",
        "The largest resident memory of any worker's process (of its GPU, on one), with torch itself and the data.",
        lambda facts: number(facts, "peak_memory_bytes"),
        units.nbytes,
    ),
)


def figure_pictures(collection: Collection, styles: Sequence[Look]) -> list[Picture]:
    """Draw each figure that the runs have; the spread over seeds only if a run has several."""
    several = any(len(run.rounds) > 1 for run in collection.runs)
    targeted = any(number(facts, "target_loss") is not None for facts in collection.summaries)
    wanted = {"time-to-target": targeted, "held-out-loss": several, "memory": len(collection.runs) > 1}
    pictures = [_rows(collection, styles, each) for each in FIGURES if wanted[each.name]]
    return [picture for picture in pictures if picture is not None]


def _rows(collection: Collection, styles: Sequence[Look], each: Figure) -> Picture | None:
    """Return one row for each strategy: a bar from zero, or a dot, with the seeds."""
    spreads = [spread(run, each.of) for run in collection.runs]
    known = [found for found in spreads if found is not None]
    if not known:
        return None
    longest = max(found.mean + found.deviation for found in known)
    # Otherwise there are longer words beside a bar.
    whole = not any(found.share for found in known)
    figure = canvas(5.6, 0.7 + 0.42 * len(spreads))
    axes = figure.add_subplot()
    plain(axes, grid="x")
    for row, (found, look) in enumerate(zip(spreads, styles, strict=True)):
        if found is None:
            words = "not reached" if each.name == "time-to-target" else "not measured"
            note(axes, words, (0, row), va="center", xycoords=axes.get_yaxis_transform(), color=MUTED.light)
            continue
        if each.from_zero:
            axes.barh(row, found.mean, height=0.55, color=look.tone.light)
        else:
            axes.scatter(found.values, [row] * len(found.values), s=12, color=look.tone.light, alpha=0.5, zorder=3)
        bar = [found.deviation] if found.deviation else None
        axes.errorbar(
            [found.mean],
            [row],
            xerr=bar,
            color=INK.light if each.from_zero else look.tone.light,
            marker="" if each.from_zero else look.marker,
            markersize=7,
            capsize=4,
            elinewidth=1.4,
            zorder=4,
        )
        end = max(found.mean + found.deviation, *found.values, found.mean)
        note(axes, each.unit(found.mean) + found.share, (end, row), (7, 0), va="center", fontweight="bold")
    axes.set_yticks(range(len(spreads)), [shortened(run.label, 20) for run in collection.runs])
    axes.tick_params(axis="y", labelcolor=INK.light)
    axes.set_ylim(len(spreads) - 0.45, -0.55)
    if each.from_zero:
        axes.set_xlim(0, (1.3 if whole else 1.7) * longest or 1)
    else:
        axes.margins(x=0.3 if whole else 0.6)
        axes.grid(True, axis="y", color=GRID.light, linewidth=0.8)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: each.unit(value) if value else "0"))
    words = [
        f"{run.label}: {'none' if found is None else each.unit(found.mean) + found.share}"
        for run, found in zip(collection.runs, spreads, strict=True)
    ]
    return Picture(each.name, figure, each.title, each.caption, f"{each.title}. {'; '.join(words)}.")
