# SPDX-License-Identifier: Apache-2.0
"""Plots of 1-bit LAMB: held-out loss beside LAMB's, and the time of a step beside that of other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reproductions.shared.curves import Curve
from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, plain


def loss_picture(curves: Mapping[str, Sequence[Curve]], warm_steps: int) -> Picture:
    """Held-out loss against steps, a line for each round."""
    figure = canvas(7.2, 4.0)
    axes = figure.subplots()
    styles = looks(list(curves))
    for look, rounds in zip(styles, curves.values(), strict=True):
        for curve in rounds:
            line(axes, look, curve.steps, curve.losses)
    axes.axvline(warm_steps, color="0.6", linewidth=0.8, linestyle=":")
    axes.annotate(
        "variance frozen",
        (warm_steps, 0.97),
        (4, 0),
        xycoords=("data", "axes fraction"),
        fontsize=8,
        textcoords="offset points",
        va="top",
    )
    plain(axes, x="steps", y="held-out loss")
    legend(figure, [key(look) for look in styles], list(curves))
    return Picture(
        name="loss",
        figure=figure,
        title="Held-out loss, sample for sample",
        caption="All methods see the same samples in the same order; the lower, the better.",
        description=f"Held-out loss against steps of {', '.join(curves)}.",
    )


def pace_picture(seconds: Mapping[str, Mapping[str, float]]) -> Picture:
    """Seconds per step of every method: a group of bars for each link."""
    figure = canvas(7.2, 4.0)
    axes = figure.subplots()
    names = list(next(iter(seconds.values())))
    styles = looks(names)
    width = 0.8 / len(names)
    for i, (look, name) in enumerate(zip(styles, names, strict=True)):
        at = [place + (i - (len(names) - 1) / 2) * width for place in range(len(seconds))]
        heights = [each[name] for each in seconds.values()]
        axes.bar(at, heights, width * 0.92, color=look.tone.light)
        for x, height in zip(at, heights, strict=True):
            axes.annotate(f"{height:.3g}", (x, height), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(seconds)), list(seconds))
    plain(axes, y="seconds per step", grid="y")
    legend(figure, [key(look) for look in styles], names)
    return Picture(
        name="pace",
        figure=figure,
        title="What a step takes",
        caption="Medians; of 1-bit LAMB and PowerSGD, of the steps after their warm-up.",
        description=f"Bars of the seconds per step of {', '.join(names)}, over {' and '.join(seconds)}.",
    )
