# SPDX-License-Identifier: Apache-2.0
"""Plots of bits: accuracy against the bytes sent, and how a rule spends them over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from reproductions.dqsgd.regression import Kept
from reproductions.dqsgd.thread_runs import Learned
from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, plain


def accuracy_picture(name: str, runs: Mapping[str, Sequence[Learned]], *, logarithmic: bool = True) -> Picture:
    """Held-out accuracy against bits sent for each parameter and step: a mark for every method's mean."""
    figure = canvas(7.2, 4.2)
    axes = figure.subplots()
    styles = looks(list(runs))
    for look, each in zip(styles, runs.values(), strict=True):
        bits = fmean(run.bits_per_entry for run in each)
        scores = [run.accuracy for run in each]
        axes.plot([bits, bits], [min(scores), max(scores)], color=look.tone.light, linewidth=1)
        axes.plot(bits, fmean(scores), color=look.tone.light, marker=look.marker, markersize=7, linestyle="none")
    if logarithmic:
        axes.set_xscale("log", base=2)
    plain(axes, x="bits sent for each parameter and step", y="held-out accuracy")
    legend(figure, [key(look) for look in styles], list(runs))
    return Picture(
        name=name,
        figure=figure,
        title="Accuracy against bits",
        caption="Every mark is a method at its best learning rate, the line through it its seeds. Up and to the left "
        "is better.",
        description=f"Held-out accuracy against bits sent of {', '.join(runs)}.",
    )


def bits_picture(runs: Sequence[Kept]) -> Picture:
    """The bits of every step under a bound on the error, and the square of the gradients they were chosen by."""
    figure = canvas(7.2, 4.2)
    upper, lower = figure.subplots(2, 1, sharex=True)
    styles = looks([f"seed {i}" for i in range(len(runs))])
    for look, run in zip(styles, runs, strict=True):
        upper.step(range(len(run.bits)), run.bits, color=look.tone.light, linewidth=1.2, where="post")
        lower.plot(range(len(run.squares)), run.squares, color=look.tone.light, linewidth=1.2)
    lower.set_yscale("log")
    plain(upper, y="bits")
    plain(lower, x="steps", y="gradients' square")
    return Picture(
        name="bits",
        figure=figure,
        title="Bits under a bound on the error",
        caption="Errors made early have time to fade, so they may be large.",
        description="The bits of every step, and how large gradients were, on logistic regression.",
    )
