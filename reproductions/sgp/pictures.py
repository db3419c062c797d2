# SPDX-License-Identifier: Apache-2.0
"""Plots of gossip and the methods it is compared with: loss against seconds, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from reproductions.shared.curves import Curve
from thinwire.lab.report.palette import INK, MUTED, Look, looks
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, key, legend, line, plain

# By condition and method: one curve for each round.
Curves = Mapping[tuple[str, str], Sequence[Curve]]


def loss_picture(curves: Curves) -> Picture:
    """Held-out loss against seconds of training, a panel for each condition, a line for each round."""
    conditions, styles = _conditions(curves), _looks(curves)
    figure = canvas(10.8, 4.3)
    panels = figure.subplots(1, len(conditions), sharey=True, squeeze=False)[0]
    for axes, condition in zip(panels, conditions, strict=True):
        for name, look in styles.items():
            for curve in curves[condition, name]:
                _line(axes, look, curve)
        axes.set_title(condition, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, x="seconds of training", y="held-out loss" if axes is panels[0] else "")
    legend(figure, [key(look) for look in styles.values()], list(styles))
    return Picture(
        "loss",
        figure,
        "Held-out loss against time",
        "All lines have the same number of steps: the sooner one ends, the faster the method; the lower, the better.",
        f"Held-out loss of {', '.join(styles)} against seconds of training, {' and '.join(conditions)}.",
    )


def pace_picture(curves: Curves) -> Picture:
    """The time of a step, cut into computing and waiting, a panel for each condition."""
    conditions, styles = _conditions(curves), _looks(curves)
    figure = canvas(10.8, 0.6 + 0.42 * len(styles))
    panels = figure.subplots(1, len(conditions), sharex=True, sharey=True, squeeze=False)[0]
    for axes, condition in zip(panels, conditions, strict=True):
        for row, (name, look) in enumerate(styles.items()):
            whole, waiting = (
                1000 * fmean(getattr(curve, what) for curve in curves[condition, name])
                for what in ("seconds_per_step", "exposed_seconds_per_step")
            )
            axes.barh(row, whole - waiting, color=look.tone.light, height=0.62)
            axes.barh(row, waiting, left=whole - waiting, color=look.tone.light, height=0.62, alpha=0.35)
            axes.text(whole, row, f"  {whole:.0f} ms", va="center", fontsize=FONT_SIZE, color=MUTED.light)
        axes.set_yticks(range(len(styles)), list(styles))
        axes.set_title(condition, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, x="milliseconds a step", grid="x")
        axes.margins(x=0.14)
    panels[0].invert_yaxis()
    return Picture(
        "pace",
        figure,
        "What a step's time is spent on",
        "Full colour is computing, what a straggler adds included; pale is waiting for messages.",
        f"Bars of the time per step of {', '.join(styles)}, cut into computing and waiting.",
    )


def _conditions(curves: Curves) -> list[str]:
    return list(dict.fromkeys(condition for condition, _ in curves))


def _looks(curves: Curves) -> dict[str, Look]:
    """One look for each method; what all are measured against has that of torch's own."""
    names = list(dict.fromkeys(name for _, name in curves))
    return dict(zip(names, looks(["ddp" if name == "AllReduce" else name for name in names]), strict=True))


def _line(axes: Axes, look: Look, curve: Curve) -> list[Line2D]:
    return line(axes, look, curve.seconds, curve.losses)
