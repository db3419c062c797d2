# SPDX-License-Identifier: Apache-2.0
"""Metrics that strategies record while they train, against steps: such as the consensus distance."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter

from thinwire.core import units
from thinwire.lab.report.curves import Vector, smoothed
from thinwire.lab.report.palette import Look
from thinwire.lab.report.picture import Picture, canvas, key, legend, plain
from thinwire.lab.report.runs import Collection, Run

_KNOWN = {
    "consensus_distance": "Euclidean distance of one worker's parameters from the mean of all workers' parameters, "
    "estimated from messages that the strategy exchanges anyway; nothing more is sent for it.",
    "budget_used": "What was sent, over what the budget of bytes has allowed since the start of the run.",
}
_LOGARITHMIC_FROM = 30.0
"""Curves whose largest value is more than this many times their smallest one get a logarithmic axis."""


def metric_pictures(collection: Collection, styles: Sequence[Look]) -> list[Picture]:
    """One picture for each metric that any run recorded."""
    names = sorted({name for run in collection.runs for step in run.steps for name in step.metrics})
    return [_picture(collection, styles, name) for name in names]


def _picture(collection: Collection, styles: Sequence[Look], name: str) -> Picture:
    figure = canvas(5.6, 3.7)
    axes = figure.add_subplot()
    words = name.replace("_", " ")
    plain(axes, x="steps", y=words)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    shown = [(run, look, *_points(run, name)) for run, look in zip(collection.runs, styles, strict=True)]
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


def _points(run: Run, name: str) -> tuple[Vector, Vector]:
    pairs = [(step.step, step.metrics[name]) for step in run.steps if name in step.metrics]
    table = np.asarray(pairs, dtype=np.float64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
