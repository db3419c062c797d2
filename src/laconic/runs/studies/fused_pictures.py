"""Arrays of models drawn: their pace beside other ways of training, and their losses upon those of separate runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from laconic.report.palette import looks
from laconic.report.picture import Picture, canvas, key, legend, plain
from laconic.runs.studies.fused_training import WAYS, Pace

Paces = Mapping[str, Mapping[int, Mapping[str, Pace]]]
Losses = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]


def pace_picture(found: Paces) -> Picture:
    """Steps of single models in a second, over those of one process after another, against the number of models."""
    figure = canvas(10.0, 5.6)
    panels = figure.subplots(2, 3).flat
    for axes, (title, sizes) in zip(panels, found.items(), strict=False):
        for look, way in zip(looks(list(WAYS)), WAYS, strict=True):
            ratios = [paces[way].models_per_second / paces["process"].models_per_second for paces in sizes.values()]
            axes.plot(
                list(sizes),
                ratios,
                color=look.tone.light,
                linestyle=look.line,
                linewidth=look.width,
                marker=look.marker,
                markersize=5,
            )
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


def loss_picture(found: Losses) -> Picture:
    """Training losses of every model: a wide pale line for the array, and a thin dark one for the separate run."""
    figure = canvas(10.0, 5.6)
    wide, thin = looks(["array", "separate"])
    for axes, (title, curves) in zip(figure.subplots(2, 3).flat, found.items(), strict=False):
        steps = range(len(curves["array"]))
        axes.plot(steps, curves["array"], color=wide.tone.light, linewidth=4, alpha=0.35)
        axes.plot(steps, curves["loop"], color=thin.tone.light, linewidth=1)
        axes.set_title(title, fontsize=9)
        plain(axes, x="step", y="training loss")
    legend(figure, [key(wide), key(thin)], ["as an array (wide, pale)", "each by itself (thin)"])
    return Picture(
        "losses",
        figure,
        "Losses of an array and of separate runs",
        "Every model has its own learning rate; the lines of an array and of separate runs fall upon each other.",
        f"Training losses of {len(found)} networks, as arrays and by themselves.",
    )
