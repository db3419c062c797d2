# SPDX-License-Identifier: Apache-2.0
"""Graphs of workers: which sends to which at each step of a period, and how fast averaging on them converges."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from thinwire.lab.report.files import Facts, text
from thinwire.lab.report.palette import INK, MUTED, PAPER, looks
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, is_narrow, key, legend, plain
from thinwire.lab.report.runs import Collection

Matrix = NDArray[np.float64]
_MOST_PANELS = 8
_MOST_NUMBERED = 32
_PER_ROW = 4
_LINK = looks(["AllReduce"])[0].tone.light
_LOWEST = 1e-4


def graph_picture(stem: str, name: str, mixings: Matrix) -> Picture:
    """Workers on a circle, clockwise from rank 0 at the top, and the messages between them: one panel for each step.

    Args:
        stem: of the file.
        name: the graph's recipe.
        mixings: the mixing matrices of a period, of shape (steps, workers, workers).
    """
    period, workers = mixings.shape[:2]
    shown = mixings[:1] if (mixings == mixings[0]).all() else mixings[:_MOST_PANELS]
    columns = min(len(shown), 2 if is_narrow() else _PER_ROW)
    rows = -(-len(shown) // columns)
    figure = canvas(max(4.2, 2.7 * columns), 0.4 + (4.0 if len(shown) == 1 else 2.8 * rows))
    figure.suptitle(f"{name}, {workers} workers", fontsize=FONT_SIZE + 2, color=INK.light)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for step, (axes, mixing) in enumerate(zip(panels, shown, strict=False)):
        title = "every step" if len(shown) == 1 else f"step {step}"
        _draw(axes, mixing, title)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    rest = f" The first {len(shown)} of {period} steps." if 1 < len(shown) < period else ""
    edges = [int(((mixing > 0) & ~np.eye(workers, dtype=bool)).sum()) for mixing in shown]
    return Picture(
        name=stem,
        figure=figure,
        title=name,
        caption=f"Lines without arrows go both ways; a wider line has a larger weight.{rest}",
        description=f"Graph of {workers} workers, {name}; messages at its steps: {', '.join(map(str, edges))}.",
    )


def topology_pictures(collection: Collection) -> list[Picture]:
    """Return one picture for each graph, however many runs have it; empty where no run recorded one."""
    found: dict[str, Facts] = {}
    for run in collection.runs:
        entry = run.config.get("topology")
        if isinstance(entry, dict) and text(entry, "name") and entry.get("mixing"):
            found.setdefault(text(entry, "name"), entry)
    pictures: list[Picture] = []
    for number, (name, entry) in enumerate(found.items()):
        mixing = np.asarray(entry["mixing"], dtype=np.float64)
        if mixing.ndim == 3 and mixing.shape[1] == mixing.shape[2]:
            pictures.append(graph_picture(f"topology-{number}", name, mixing))
    return pictures


def agreement_picture(stem: str, curves: Mapping[str, Sequence[float]], workers: int) -> Picture:
    """Return the fraction of disagreement that is left against steps, one line for each graph.

    Args:
        stem: of the file.
        curves: by the graph's recipe, the fraction left after 0, 1, ... steps.
        workers: how many there are.
    """
    figure = canvas(7.6, 4.6)
    axes = figure.add_subplot()
    plain(axes, x="steps", y="largest fraction of disagreement left")
    # Zero, where a graph is exact, has no logarithm: draw it below the axis, so that the line leaves the picture.
    shown = {name: np.maximum(left, _LOWEST / 10) for name, left in curves.items()}
    groups: list[list[str]] = []
    for name, values in shown.items():
        same = next((group for group in groups if np.allclose(values, shown[group[0]], rtol=1e-6)), None)
        same.append(name) if same is not None else groups.append([name])
    styles = looks([group[0] for group in groups])
    exact = [int((shown[group[0]] > _LOWEST / 10).sum()) for group in groups]
    for place, (look, (name, *_)) in enumerate(zip(styles, groups, strict=True)):
        # Lines of graphs that are exact at the same step lie on each other there: those below are wider.
        above = exact[place + 1 :].count(exact[place]) if exact[place] < len(shown[name]) else 0
        axes.plot(
            shown[name],
            color=look.tone.light,
            linestyle=look.line,
            linewidth=1.6 + 2.2 * above,
            marker=look.marker,
            markersize=3.5,
        )
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST, 1.3)
    axes.set_xlim(0, max(len(left) for left in curves.values()) - 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    named = (", ".join(each.removesuffix("()") for each in group) for group in groups)
    legend(figure, [key(look) for look in styles], list(named), most=70)
    return Picture(
        name=stem,
        figure=figure,
        title=f"Agreement of {workers} workers",
        caption="Lines that leave the picture are below 1e-4, or exactly at the average. Graphs with one line agree "
        "equally fast.",
        description=f"Disagreement among {workers} workers against steps for {len(curves)} graphs, on a log axis.",
    )


def _draw(axes: Axes, mixing: Matrix, title: str) -> None:
    size = len(mixing)
    angles = np.pi / 2 - 2 * np.pi * np.arange(size) / size
    places = np.column_stack([np.cos(angles), np.sin(angles)])
    radius = min(0.11, 1.6 / size)
    both = (mixing > 0) & (mixing.T > 0)
    _lines(axes, places, np.triu(np.where(both, mixing, 0.0), 1))
    _arrows(axes, places, np.where(both, 0.0, mixing), radius)
    dots = 90 * min(1.0, 12 / size)
    axes.scatter(*places.T, s=dots, color=PAPER.light, edgecolors=INK.light, linewidths=1.0, zorder=3)
    for rank, (x, y) in enumerate(places if size <= _MOST_NUMBERED else []):
        out = 1 + radius + 0.1
        axes.text(out * x, out * y, str(rank), ha="center", va="center", fontsize=FONT_SIZE - 1, color=MUTED.light)
    axes.set_title(title, fontsize=FONT_SIZE, color=MUTED.light)
    axes.set_xlim(-1.35, 1.35)
    axes.set_ylim(-1.35, 1.35)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _lines(axes: Axes, places: Matrix, weights: Matrix) -> None:
    """Draw the edges that go both ways."""
    ends = np.argwhere(weights > 0)
    widths = [_width(float(weights[i, j])) for i, j in ends]
    axes.add_collection(LineCollection(list(places[ends]), colors=_LINK, linewidths=widths, alpha=0.75, zorder=1))


def _arrows(axes: Axes, places: Matrix, weights: Matrix, radius: float) -> None:
    """Draw the edges that go one way, between the rims of the dots; a row of the weights is a receiver."""
    for receiver, sender in np.argwhere(weights > 0):
        start, end = places[sender], places[receiver]
        short = radius * (end - start) / np.linalg.norm(end - start)
        look = {
            "arrowstyle": "-|>",
            "color": _LINK,
            "linewidth": _width(float(weights[receiver, sender])),
            "alpha": 0.75,
        }
        axes.annotate("", tuple(end - short), tuple(start + short), arrowprops={**look, "shrinkA": 0, "shrinkB": 0})


def _width(weight: float) -> float:
    return 0.5 + 2.2 * weight
