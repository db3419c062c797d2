# SPDX-License-Identifier: Apache-2.0
"""Slow momentum beside its bases, drawn: loss against the learning rate, and the losses of every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from reproductions.slowmo.steps import Figures, Runs
from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, plain


def tuning_picture(runs: Runs) -> Picture:
    """Held-out loss of every trial against its learning rate; a line joins those of one recipe."""
    figure = canvas(7.2, 4.4)
    axes = figure.subplots()
    names = list(runs)
    rates = sorted({trial.lr for trials in runs.values() for trial in trials})
    for look, name in zip(looks(names), names, strict=True):
        for recipe in dict.fromkeys(trial.recipe for trial in runs[name]):
            found = {
                trial.lr: fmean(each.held_out_loss for each in seeds)
                for trial, seeds in runs[name].items()
                if trial.recipe == recipe
            }
            at = sorted(found)
            line(axes, look, at, [found[lr] for lr in at], size=5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(rates)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    plain(axes, x="learning rate", y="held-out loss, nats")
    legend(figure, [key(look) for look in looks(names)], names)
    return Picture(
        "tuning",
        figure,
        "Held-out loss against the learning rate",
        "Each method was given the same number of trials. Of two lines in one colour, one keeps the workers' momentum "
        "and one forgets it.",
        f"Held-out loss of {len(names)} methods against the learning rate.",
    )


def loss_picture(ended: Mapping[str, Sequence[Figures]]) -> Picture:
    """Training and held-out loss of every seed, and their means, method by method."""
    figure = canvas(9.6, 0.9 + 0.5 * len(ended))
    left, right = figure.subplots(1, 2, sharey=True)
    _dots(left, {name: [each.train_loss for each in seeds] for name, seeds in ended.items()})
    _dots(right, {name: [each.held_out_loss for each in seeds] for name, seeds in ended.items()})
    plain(left, x="training loss, nats", grid="x")
    plain(right, x="held-out loss, nats", grid="x")
    return Picture(
        "losses",
        figure,
        "Losses after the same number of steps",
        "A dot is a seed, a line the mean; every method at its best trial.",
        f"Training and held-out losses of {len(ended)} methods, a dot for each seed.",
    )


def _dots(axes: Axes, losses: Mapping[str, Sequence[float]]) -> None:
    names = list(losses)
    for place, (look, name) in enumerate(zip(looks(names), names, strict=True)):
        found = losses[name]
        axes.plot(found, [place] * len(found), "o", color=look.tone.light, markersize=5, alpha=0.45)
        axes.vlines(fmean(found), place - 0.3, place + 0.3, color=look.tone.light, linewidth=2.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
