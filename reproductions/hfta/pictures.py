# SPDX-License-Identifier: Apache-2.0
"""Arrays of models drawn: their pace beside other ways of training, and their losses upon those of separate runs."""

from __future__ import annotations

from collections.abc import Mapping

from reproductions.hfta.losses import Losses
from reproductions.hfta.training import WAYS, Paces, speedup
from thinwire.lab.report.palette import looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, plain

_LEAST = 1e-17


def pace_picture(found: Paces) -> Picture:
    """Steps of single models in a second, over those of one process after another, against the number of models."""
    figure = canvas(10.0, 5.6)
    panels = figure.subplots(2, 3).flat
    for axes, (title, sizes) in zip(panels, found.items(), strict=False):
        for look, way in zip(looks(list(WAYS)), WAYS, strict=True):
            ratios = [speedup(paces, way, "process") for paces in sizes.values()]
            line(axes, look, list(sizes), ratios, size=5)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(list(sizes))
        axes.set_ylim(bottom=0)
        plain(axes, x="models", y="pace over one at a time")
    legend(figure, [key(look) for look in looks(list(WAYS))], list(WAYS.values()))
    return Picture(
        "pace",
        figure,
        "Throughput of many models",
        "Steps of single models in a second, over those of one process after another on the same cores.",
        f"Throughput of {len(WAYS)} ways of training many models, for {len(found)} networks.",
    )


def loss_picture(found: Mapping[str, Losses]) -> Picture:
    """Training losses of every model: a wide pale line for the array, and a dashed one upon it for the separate run."""
    figure = canvas(10.0, 5.6)
    wide, thin = looks(["array", "separate"])
    for axes, (title, each) in zip(figure.subplots(2, 3).flat, found.items(), strict=False):
        steps = range(len(each.array))
        axes.plot(steps, each.array, color=wide.tone.light, linewidth=5, alpha=0.4)
        axes.plot(steps, each.separate, color=thin.tone.light, linewidth=1.2, linestyle=(0, (3, 2)))
        axes.set_title(title, fontsize=9)
        plain(axes, x="step", y="training loss")
    legend(figure, [key(wide), key(thin)], ["as an array (wide, pale)", "each by itself (thin, dashed)"])
    return Picture(
        "losses",
        figure,
        "Losses of an array and of separate runs",
        "Every model has its own learning rate; in fp64 the lines of arrays and of separate runs fall upon each other.",
        f"Training losses of {len(found)} networks in fp64, as arrays and by themselves.",
    )


def difference_picture(found: Mapping[str, Losses]) -> Picture:
    """How far losses are apart after each step, in fp64 and fp32, beside what rounding alone does in fp32."""
    figure = canvas(10.0, 5.6)
    ways = ["an array, fp64", "an array, fp32", "separate runs one rounding apart, fp32"]
    for axes, (title, each) in zip(figure.subplots(2, 3).flat, found.items(), strict=False):
        for look, curve in zip(looks(ways), (each.difference, each.short_difference, each.short_drift), strict=True):
            axes.semilogy(curve.clamp(min=_LEAST), color=look.tone.light, linestyle=look.line, linewidth=look.width)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(_LEAST, 1.0)
        plain(axes, x="step", y="difference / first loss")
    legend(figure, [key(look) for look in looks(ways)], ways)
    return Picture(
        "differences",
        figure,
        "How far losses are from those of separate runs",
        "The largest of any model, of its first loss. In fp32 rounding also grows between separate runs that begin one "
        "rounding apart.",
        f"Differences of the losses of {len(found)} networks from those of separate runs, step by step.",
    )
