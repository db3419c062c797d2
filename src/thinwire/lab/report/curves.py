# SPDX-License-Identifier: Apache-2.0
"""Loss against steps, seconds and bytes, and the metrics of strategies against steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from thinwire.lab.report.files import number
from thinwire.lab.report.palette import INK, MUTED, PAPER, Look
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, key, legend, note, plain
from thinwire.lab.report.runs import Collection, Evaluation, Run, Step
from thinwire.planning import units

Vector = NDArray[np.float64]
# Longer curves are thinned out, to keep the page small.
_MOST_POINTS = 500
_LINES = (
    "Lines are the training loss, the mean over workers, smoothed over 1/25 of the run; the faint lines are the loss "
    "of each step."
)
_CAPTIONS = {
    "seconds": "Time spent on evaluation is not counted.",
    "steps": "Shows which strategy learns most from the same number of steps.",
    "bytes": "Shows which strategy learns most from the same traffic; packet headers are not counted here.",
}
_KNOWN = {
    "consensus_distance": "Euclidean distance of one worker's parameters from the mean of all workers' parameters, "
    "estimated from messages that the strategy exchanges anyway; nothing more is sent for it.",
    "budget_used": "What was sent, over what the budget of bytes has allowed since the start of the run.",
}
_LOGARITHMIC_FROM = 30.0
"""Curves whose largest value is more than this many times their smallest one get a logarithmic axis."""


@dataclass(frozen=True)
class Measure:
    """What the loss is drawn against: its name, words for it, the axis label, its value at a point, and a size."""

    name: str
    words: str
    axis: str
    of: Callable[[Step | Evaluation], float]
    size: tuple[float, float]


MEASURES = (
    Measure("seconds", "seconds of training", "seconds of training", lambda point: point.seconds, (10.8, 4.3)),
    Measure("steps", "steps", "steps", lambda point: point.step, (5.6, 3.7)),
    Measure(
        "bytes", "bytes sent per worker", "payload bytes sent per worker", lambda point: point.payload_bytes, (5.6, 3.7)
    ),
)


def loss_pictures(collection: Collection, styles: Sequence[Look]) -> list[Picture]:
    """Return the loss against seconds, steps and bytes, without pictures that would have no finite loss."""
    return [
        _picture(collection, styles, measure)
        for measure in MEASURES
        if any(len(_points(run.steps, measure)[0]) for run in collection.runs)
    ]


def smoothed(values: Vector) -> Vector:
    """Return the moving average over 1/25 of the points.

    The window is centred. At the start, where losses fall fast, it shrinks on both sides; at the end it is cut off.
    """
    size = len(values)
    radius = size // 50
    sums = np.concatenate(([0.0], np.cumsum(values)))
    index = np.arange(size)
    low = index - np.minimum(radius, index)
    high = index + np.minimum(np.minimum(radius, index), size - 1 - index) + 1
    return (sums[high] - sums[low]) / (high - low)


def _picture(collection: Collection, styles: Sequence[Look], measure: Measure) -> Picture:
    figure = canvas(*measure.size)
    axes = figure.add_subplot()
    plain(axes, x=measure.axis, y="loss")
    for run, look in zip(collection.runs, styles, strict=True):
        _draw(axes, run, look, measure)
    _fit(axes, collection, measure)
    _target(axes, collection)
    if measure.name == "seconds":
        _rings(axes, collection, styles)
    legend(figure, [key(look) for look in styles], [run.label for run in collection.runs])
    return Picture(
        name=f"loss-{measure.name}",
        figure=figure,
        title=f"Loss against {measure.words}",
        caption=_caption(collection, measure),
        description=_description(collection, measure),
    )


def _caption(collection: Collection, measure: Measure) -> str:
    """Return what the lines and markers of this picture are."""
    parts = [_LINES] if measure.name == "seconds" else ["Lines and markers as in the loss against seconds."]
    if measure.name == "seconds" and any(run.evaluations for run in collection.runs):
        parts.append("Filled markers are the held-out loss.")
    reached = any(number(run.summary, "seconds_to_target") is not None for run in collection.runs)
    if measure.name == "seconds" and reached and _targets(collection):
        parts.append("Rings are the time at which it reached the target.")
    return " ".join([*parts, _CAPTIONS[measure.name]])


def _draw(axes: Axes, run: Run, look: Look, measure: Measure) -> None:
    across, loss = _points(run.steps, measure)
    if len(loss):
        smooth, size = smoothed(loss), len(loss)
        chosen = np.unique(np.linspace(0, size - 1, min(size, _MOST_POINTS)).round().astype(np.int64))
        axes.plot(across[chosen], loss[chosen], color=look.tone.light, linewidth=0.7, alpha=0.22)
        axes.plot(across[chosen], smooth[chosen], color=look.tone.light, linewidth=look.width, linestyle=look.line)
    across, loss = _points(run.evaluations, measure)
    axes.plot(
        across,
        loss,
        linestyle="none",
        marker=look.marker,
        markersize=6,
        color=look.tone.light,
        markeredgecolor=PAPER.light,
        markeredgewidth=0.9,
        zorder=4,
    )


def _points(points: Sequence[Step | Evaluation], measure: Measure) -> tuple[Vector, Vector]:
    pairs = [(measure.of(point), point.loss) for point in points]
    finite = [pair for pair in pairs if math.isfinite(pair[0]) and math.isfinite(pair[1])]
    table = np.asarray(finite, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _fit(axes: Axes, collection: Collection, measure: Measure) -> None:
    """Set limits that hold every smoothed curve, and a logarithmic axis of bytes where totals differ much."""
    curves = [smoothed(loss) for run in collection.runs if len(loss := _points(run.steps, measure)[1])]
    held_out = [_points(run.evaluations, measure)[1] for run in collection.runs]
    everything = np.concatenate([*curves, *held_out, np.asarray(sorted(_targets(collection)))])
    low, high = float(everything.min()), float(everything.max())
    margin = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)
    if measure.name == "bytes":
        _fit_bytes(axes, collection, measure)
        return
    _from_zero(axes)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _from_zero(axes: Axes) -> None:
    """Begin the axis at zero, with room for a marker there."""
    end = axes.get_xlim()[1]
    axes.set_xlim(-0.012 * end, end)


def _fit_bytes(axes: Axes, collection: Collection, measure: Measure) -> None:
    totals = [float(across.max()) for run in collection.runs if len(across := _points(run.steps, measure)[0])]
    sent = [total for total in totals if total > 0]
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    # On a linear axis, a strategy that sends a twentieth of another would end in the first marks.
    if not sent or max(sent) < 20 * min(sent):
        _from_zero(axes)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set_xlim(left=min(sent) / 60)
    plain(axes, x="payload bytes sent per worker (logarithmic)", y="loss")


def _targets(collection: Collection) -> set[float]:
    return {target for facts in collection.summaries if (target := number(facts, "target_loss")) is not None}


def _target(axes: Axes, collection: Collection) -> None:
    for target in _targets(collection):
        axes.axhline(target, color=INK.light, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        style = {"xycoords": ("axes fraction", "data"), "ha": "right", "fontsize": FONT_SIZE - 1, "color": MUTED.light}
        note(axes, f"target {units.mark(target)}", (1, target), (0, 3), **style)


def _rings(axes: Axes, collection: Collection, styles: Sequence[Look]) -> None:
    """Draw a ring where each run reached the target, as its summary has it."""
    for run, look in zip(collection.runs, styles, strict=True):
        seconds, target = number(run.summary, "seconds_to_target"), number(run.summary, "target_loss")
        if seconds is None or target is None:
            continue
        axes.plot(
            [seconds],
            [target],
            linestyle="none",
            marker="o",
            markersize=8,
            markerfacecolor=PAPER.light,
            markeredgecolor=look.tone.light,
            markeredgewidth=2.0,
            zorder=5,
        )


def _description(collection: Collection, measure: Measure) -> str:
    parts: list[str] = []
    for run in collection.runs:
        across, loss = _points(run.steps, measure)
        if not len(loss):
            parts.append(f"{run.label}: no loss recorded")
            continue
        end = units.nbytes(across[-1]) if measure.name == "bytes" else f"{units.digits(across[-1])} {measure.name}"
        parts.append(f"{run.label}: from {units.score(loss[0])} to {units.score(smoothed(loss)[-1])} in {end}")
    return f"Line chart of training loss against {measure.words}. {'; '.join(parts)}."


# -- metrics that strategies record while they train, such as the consensus distance -----------------------------------


def metric_pictures(collection: Collection, styles: Sequence[Look]) -> list[Picture]:
    """Return one picture for each metric that any run recorded."""
    names = sorted({name for run in collection.runs for step in run.steps for name in step.metrics})
    return [_metric_picture(collection, styles, name) for name in names]


def _metric_picture(collection: Collection, styles: Sequence[Look], name: str) -> Picture:
    figure = canvas(5.6, 3.7)
    axes = figure.add_subplot()
    words = name.replace("_", " ")
    plain(axes, x="steps", y=words)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    shown = [(run, look, *_metric_points(run, name)) for run, look in zip(collection.runs, styles, strict=True)]
    shown = [each for each in shown if len(each[2])]
    for _, look, across, values in shown:
        axes.plot(across, smoothed(values), color=look.tone.light, linewidth=look.width, linestyle=look.line)
    positive = np.concatenate([values[values > 0] for *_, values in shown])
    if len(positive) and positive.max() > _LOGARITHMIC_FROM * positive.min():
        axes.set_yscale("log")
    legend(figure, [key(look) for _, look, *_ in shown], [run.label for run, *_ in shown])
    ends = "; ".join(
        f"{run.label}: {units.digits(values[0])} to {units.digits(values[-1])}" for run, _, _, values in shown
    )
    return Picture(
        name=f"metrics-{name.replace('_', '-')}",
        figure=figure,
        title=words.capitalize(),
        caption=_KNOWN.get(name, "As recorded by the strategy while it trained; the mean over workers, smoothed."),
        description=f"Line chart of {words} against steps. {ends}.",
    )


def _metric_points(run: Run, name: str) -> tuple[Vector, Vector]:
    pairs = [(step.step, step.metrics[name]) for step in run.steps if name in step.metrics]
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
