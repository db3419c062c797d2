# SPDX-License-Identifier: Apache-2.0
"""Which recipe is fastest where: lines of step time against link rate, latency and number of workers."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from thinwire.core import units
from thinwire.lab.report.files import write_bytes
from thinwire.lab.report.palette import MUTED, PAPER, looks
from thinwire.lab.report.picture import canvas, key, legend, plain

_MOST_TICKS = 5


@dataclass(frozen=True)
class Sweep:
    """Step times against one property of the network.

    Attributes:
        name: of the property, for the axis.
        unit: "rate" in bits per second, "seconds", or "count".
        values: of it, ascending.
        seconds: of a step, by recipe, one for each value; infinite where a recipe cannot serve.
        here: the value of the network that is planned for; None if it is none.
    """

    name: str
    unit: str
    values: Sequence[float]
    seconds: Mapping[str, Sequence[float]]
    here: float | None = None


def draw_crossovers(path: Path, sweeps: Sequence[Sweep], title: str) -> None:
    """Write a picture, as PNG, SVG or PDF by the path's suffix."""
    recipes = list(sweeps[0].seconds)
    styles = looks(recipes)
    figure = canvas(4.0 * len(sweeps), 3.9)
    words = {"rate": units.rate, "seconds": units.seconds, "count": units.count}
    for place, sweep in enumerate(sweeps):
        axes = figure.add_subplot(1, len(sweeps), place + 1)
        plain(axes, x=sweep.name, y="seconds of a step" if place == 0 else "")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for recipe, look in zip(recipes, styles, strict=True):
            axes.plot(
                sweep.values,
                sweep.seconds[recipe],
                color=look.tone.light,
                linestyle=look.line,
                marker=look.marker,
                markersize=3.5,
                linewidth=look.width,
            )
        if sweep.here is not None:
            axes.axvline(sweep.here, color=MUTED.light, linewidth=0.8, linestyle=":")
        say = words[sweep.unit]
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _, say=say: say(value)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: units.seconds(value)))
        axes.set_xticks(list(sweep.values)[:: -(-len(sweep.values) // _MOST_TICKS)])
        axes.minorticks_off()
    legend(figure, [key(look) for look in styles], recipes, title=title)
    kind = path.suffix.removeprefix(".").lower() or "png"
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=160, facecolor=PAPER.light)
    write_bytes(path, content.getvalue())
