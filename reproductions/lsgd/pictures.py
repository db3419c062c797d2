# SPDX-License-Identifier: Apache-2.0
"""Leaders and springs drawn: loss against time, who led, and where they go down a hill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from reproductions.lsgd.landscapes import EVERY, Descent
from reproductions.shared.curves import Curve
from thinwire.lab.report.palette import INK, MUTED, looks
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, key, legend, line, plain


def loss_picture(curves: Mapping[str, Sequence[Curve]]) -> Picture:
    """Held-out loss against seconds of training, a line for each round."""
    figure = canvas(8.4, 4.4)
    axes, styles = figure.subplots(), looks(list(curves))
    for look, rounds in zip(styles, curves.values(), strict=True):
        for curve in rounds:
            line(axes, look, curve.seconds, curve.losses)
    axes.set_yscale("log")
    plain(axes, x="seconds of training", y="held-out loss, nats")
    legend(figure, [key(look) for look in styles], list(curves))
    return Picture(
        "loss",
        figure,
        "Held-out loss against time",
        "All methods have the same time over the same link, each at its own learning rate.",
        f"Held-out loss of {', '.join(curves)} against seconds of training.",
    )


def leaders_picture(led: Mapping[str, Sequence[int]]) -> Picture:
    """How often each worker led all of them."""
    figure = canvas(7.2, 1.2 + 0.32 * max(map(len, led.values())) * len(led))
    panels = figure.subplots(len(led), 1, sharex=True, squeeze=False)[:, 0]
    for axes, look, (name, counts) in zip(panels, looks(list(led)), led.items(), strict=True):
        axes.barh(range(len(counts)), counts, color=look.tone.light, height=0.62)
        axes.set_yticks(range(len(counts)), [f"worker {rank}" for rank in range(len(counts))])
        axes.invert_yaxis()
        axes.set_title(name, fontsize=FONT_SIZE, color=INK.light)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        plain(axes, x="elections won" if axes is panels[-1] else "", grid="x")
    return Picture(
        "leaders",
        figure,
        "How often each worker led",
        "Workers whose data are alike should lead about equally often.",
        f"Bars of the elections that each worker won, under {' and '.join(led)}.",
    )


def well_picture(descents: Mapping[str, Descent]) -> Picture:
    """Where two workers of a double well are after each step, a panel for each recipe."""
    figure = canvas(10.2, 3.3)
    panels = figure.subplots(1, len(descents), sharey=True, squeeze=False)[0]
    for axes, (name, descent) in zip(panels, descents.items(), strict=True):
        _well(axes, descent)
        axes.set_title(name, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, x="step", y="place" if axes is panels[0] else "")
    return Picture(
        "double-well",
        figure,
        "Two workers, two wells",
        "Minima at 1 and at -1 (dotted), a hill between them. A strong spring keeps both workers off their minima and "
        "the centre on the hill; a leader stands in its minimum, and a strong pull brings the other over.",
        f"Places of two workers in a double well after each step, under {', '.join(descents)}.",
    )


def _well(axes: Axes, descent: Descent) -> None:
    for worker, look in enumerate(looks(["AllReduce", "SlowMo"])):
        axes.plot(descent.places[:, worker, 0].tolist(), color=look.tone.light, linewidth=1.8)
    for minimum in (-1, 1):
        axes.axhline(minimum, color=MUTED.light, linestyle=":", linewidth=1)


def completion_picture(losses: Mapping[str, Sequence[Descent]]) -> Picture:
    """The loss of what would be shipped, against steps, a line for each matrix."""
    figure = canvas(7.2, 4.2)
    axes, styles = figure.subplots(), looks(list(losses))
    for look, descents in zip(styles, losses.values(), strict=True):
        for descent in descents:
            steps = range(0, EVERY * len(descent.shipped), EVERY)
            axes.plot(steps, descent.shipped.tolist(), color=look.tone.light, linestyle=look.line, linewidth=1.3)
    axes.set_yscale("log")
    plain(axes, x="step", y="loss of the shipped factors")
    legend(figure, [key(look) for look in styles], list(losses))
    return Picture(
        "completion",
        figure,
        "Matrix completion",
        "Four workers begin apart. A spring's centre is a mean of factors that fit the matrix in different ways; a "
        "leader is one of them.",
        f"Loss of the shipped factors against steps, under {' and '.join(losses)}.",
    )
