# SPDX-License-Identifier: Apache-2.0
"""The report of a sweep: every trial's loss against every hyperparameter, and a table of trials."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

from matplotlib.axes import Axes

from thinwire.lab.report.document import render
from thinwire.lab.report.files import write_text
from thinwire.lab.report.palette import OTHER, looks
from thinwire.lab.report.picture import Picture, canvas, plain

_ACROSS = 3
Values = Sequence[float | int | str]


def write_sweep(
    folder: Path,
    hyperparameters: Mapping[str, Values],
    losses: Sequence[float],
    stopped: Sequence[bool],
    *,
    logarithmic: Sequence[str],
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> Path:
    """Write `report.html` and `plots/sweep.png`, and return the page's path.

    Args:
        folder: folder of the files.
        hyperparameters: the value of each hyperparameter in every trial.
        losses: held-out loss of every trial in nats; not finite where it diverged.
        stopped: whether each trial was stopped early.
        logarithmic: hyperparameters shown on a logarithmic axis.
        title: title of the page.
        headings: column headings of the table.
        rows: rows of the table, best trial first.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    picture = sweep_picture(hyperparameters, losses, stopped, logarithmic)
    picture.png(folder / "plots")
    values = {"picture": picture, "narrow": {}, "heading": "Trials, best first", "headings": headings, "rows": rows}
    return write_text(folder / "report.html", render("table.html", title, "thinwire sweep", **values))


def sweep_picture(
    hyperparameters: Mapping[str, Values], losses: Sequence[float], stopped: Sequence[bool], logarithmic: Sequence[str]
) -> Picture:
    """Plots of loss against each hyperparameter.

    Trials that were stopped early are hollow; diverged ones are drawn at the upper edge.
    """
    down = -(-len(hyperparameters) // _ACROSS)
    across = min(len(hyperparameters), _ACROSS)
    figure = canvas(1.2 + 3.2 * across, 0.6 + 2.8 * down)
    finite = [loss for loss in losses if isfinite(loss)]
    top = max(finite, default=1.0)
    # Diverged trials are drawn at the upper edge, where they cannot stretch the axis.
    shown = [loss if isfinite(loss) else top for loss in losses]
    for place, (name, values) in enumerate(hyperparameters.items(), 1):
        axes = figure.add_subplot(down, across, place)
        plain(axes, x=name, y="held-out loss, nats")
        if name in logarithmic:
            axes.set_xscale("log")
        if finite and max(finite) > 4 * min(finite) > 0:
            axes.set_yscale("log")
        _dots(axes, values, shown, stopped)
    diverged = len(losses) - len(finite)
    return Picture(
        name="sweep",
        figure=figure,
        title="Loss by hyperparameter",
        caption="Every trial's held-out loss against each of its hyperparameters. Hollow: stopped early."
        + (f" {diverged} diverged and are drawn at the upper edge." if diverged else ""),
        description=f"Scatter plots of {len(losses)} trials' losses against {', '.join(hyperparameters)}.",
    )


def _dots(axes: Axes, values: Values, losses: Sequence[float], stopped: Sequence[bool]) -> None:
    tone = looks(["AllReduce"])[0].tone.light
    best = min(range(len(losses)), key=losses.__getitem__)
    for hollow, face in ((True, "none"), (False, tone)):
        places = [place for place, early in enumerate(stopped) if early == hollow and place != best]
        axes.scatter(
            [values[place] for place in places],
            [losses[place] for place in places],
            s=18,
            facecolors=face,
            edgecolors=tone if hollow else "none",
            alpha=0.7,
        )
    axes.scatter([values[best]], [losses[best]], s=46, marker="D", color=OTHER.light, edgecolors=tone)
