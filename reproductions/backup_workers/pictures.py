# SPDX-License-Identifier: Apache-2.0
"""Backup workers against waiting for all and for nobody, drawn: loss against time, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from reproductions.backup_workers.race import Ran
from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, plain

Chosen = Mapping[tuple[str, str], Sequence[Ran]]
"""Of (which workers are late, method): its races at the best learning rate, one for each seed."""


def time_picture(chosen: Chosen) -> Picture:
    """Held-out loss against seconds, the first seed of every method."""
    conditions, names = _axes_of(chosen)
    figure, styles = canvas(9.6, 4.0), looks(names)
    for axes, condition in zip(figure.subplots(1, len(conditions), sharey=True), conditions, strict=True):
        for look, name in zip(styles, names, strict=True):
            ran = chosen[condition, name][0]
            axes.plot(ran.seconds, ran.losses, color=look.tone.light, linestyle=look.line, linewidth=look.width)
        axes.set_yscale("log")
        axes.set_title(condition, fontsize=10)
        plain(axes, x="seconds", y="held-out loss" if condition == conditions[0] else "")
    legend(figure, [key(look) for look in styles], names)
    return Picture(
        name="time",
        figure=figure,
        title="Held-out loss against time",
        caption="One seed, each method at a learning rate of its own unless another is named.",
        description="Two charts of held-out loss against seconds, one line for each method.",
    )


def ends_picture(chosen: Chosen) -> Picture:
    """What every method ends with: a group of bars for each kind of late workers, means of seeds."""
    conditions, names = _axes_of(chosen)
    figure, styles = canvas(7.2, 3.8), looks(names)
    axes, width = figure.subplots(), 0.8 / len(names)
    for i, (look, name) in enumerate(zip(styles, names, strict=True)):
        ends = [[ran.end for ran in chosen[condition, name]] for condition in conditions]
        at = [place + (i - (len(names) - 1) / 2) * width for place in range(len(conditions))]
        low = [fmean(each) - min(each) for each in ends]
        high = [max(each) - fmean(each) for each in ends]
        axes.bar(at, [fmean(each) for each in ends], width * 0.92, color=look.tone.light, yerr=(low, high), capsize=3)
    axes.set_xticks(range(len(conditions)), conditions)
    plain(axes, y="held-out loss at the end", grid="y")
    legend(figure, [key(look) for look in styles], names)
    return Picture(
        name="ends",
        figure=figure,
        title="Held-out loss after the same time",
        caption="Means over seeds of the last three looks; bars reach from the least to the greatest.",
        description="Bars of the held-out loss at the end for each method, with two kinds of late workers.",
    )


def _axes_of(chosen: Chosen) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(c for c, _ in chosen)), list(dict.fromkeys(name for _, name in chosen))
