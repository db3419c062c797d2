# SPDX-License-Identifier: Apache-2.0
"""Overlap Local-SGD beside its relatives, drawn: who waits how much, and loss against the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, plain


def waiting_picture(shares: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """The share of time in which workers only wait: a group of bars for each kind of workers, medians of rounds."""
    figure = canvas(7.2, 3.8)
    axes = figure.subplots()
    names = list(next(iter(shares.values())))
    styles = looks(names)
    width = 0.8 / len(names)
    for i, (look, name) in enumerate(zip(styles, names, strict=True)):
        middles = [median(shares[when][name]) for when in shares]
        at = [place + (i - (len(names) - 1) / 2) * width for place in range(len(shares))]
        low = [middle - min(shares[when][name]) for middle, when in zip(middles, shares, strict=True)]
        high = [max(shares[when][name]) - middle for middle, when in zip(middles, shares, strict=True)]
        axes.bar(at, middles, width * 0.92, color=look.tone.light, yerr=(low, high), capsize=3)
        for x, middle in zip(at, middles, strict=True):
            axes.annotate(f"{middle:.1%}", (x, middle), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(shares)), list(shares))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    plain(axes, y="share of time spent waiting", grid="y")
    legend(figure, [key(look) for look in styles], names)
    return Picture(
        name="waiting",
        figure=figure,
        title="How much of the time workers only wait",
        caption="Medians of rounds; bars reach from the least to the greatest round.",
        description="Bars of the share of time spent waiting, for each method, with even and with stalling workers.",
    )


def loss_picture(losses: Mapping[tuple[str, str], Mapping[float, Sequence[float]]]) -> Picture:
    """Held-out loss of every method against its learning rate, on like and on unlike data."""
    kinds = list(dict.fromkeys(words for words, _ in losses))
    names = list(dict.fromkeys(name for _, name in losses))
    figure = canvas(9.6, 4.0)
    styles = looks(names)
    for axes, words in zip(figure.subplots(1, len(kinds), sharey=True), kinds, strict=True):
        for look, name in zip(styles, names, strict=True):
            trials = losses[words, name]
            line(axes, look, list(trials), [fmean(each) for each in trials.values()], size=5)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sorted(next(iter(losses.values()))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_title(words, fontsize=10)
        plain(axes, x="learning rate", y="held-out loss" if words == kinds[0] else "")
    legend(figure, [key(look) for look in styles], names)
    return Picture(
        name="loss",
        figure=figure,
        title="Held-out loss after the same number of steps",
        caption="Means over seeds.",
        description="Two charts of held-out loss against the learning rate, one line for each method.",
    )
