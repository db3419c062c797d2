# SPDX-License-Identifier: Apache-2.0
"""The pictures of claims: lines in panels, and groups of bars; a method has one look in all panels.

matplotlib is imported when something is drawn, so that claims are measured without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from thinwire.lab.report.palette import Look
    from thinwire.lab.report.picture import Picture

Found = TypeVar("Found")
Line = Mapping[float, float | Sequence[float]] | Mapping[int, float | Sequence[float]]
"""By place along x a value, or one for each seed: the mean is drawn, with a stroke from the least to the greatest."""


@dataclass(frozen=True)
class Panel:
    """Lines that share two axes.

    Args:
        title: of the panel.
        lines: by method.
        x: label of the axis along x.
        y: label of the other axis.
        log: which axes are logarithmic: "x", "y", "xy" or none.
        ticks: along x; matplotlib's own unless given.
        levels: values that are marked by a dotted line.
    """

    title: str
    lines: Mapping[str, Sequence[Line]]
    x: str = ""
    y: str = ""
    log: str = ""
    ticks: Sequence[float] = ()
    levels: Sequence[float] = ()


def nested(found: Mapping[tuple[str, str], Found]) -> dict[str, dict[str, Found]]:
    """Turn a mapping by (condition, method) into one by condition, then by method.

    Example:
        >>> nested({("even", "a"): 1, ("even", "b"): 2, ("late", "a"): 3})
        {'even': {'a': 1, 'b': 2}, 'late': {'a': 3}}
    """
    groups: dict[str, dict[str, Found]] = {}
    for (condition, name), each in found.items():
        groups.setdefault(condition, {})[name] = each
    return groups


def lines(
    name: str,
    panels: Sequence[Panel],
    *,
    title: str,
    caption: str,
    columns: int = 0,
    shared: bool = False,
    size: float = 4.0,
    reference: str = "",
) -> Picture:
    """Draw panels of lines.

    Args:
        name: of the file.
        panels: from the top left on.
        title: of the picture.
        caption: what a reader must know.
        columns: of panels; all in one row unless given.
        shared: the panels have one axis along y.
        size: of markers, in points; 0 for none.
        reference: the method that looks as PyTorch's own does elsewhere.
    """
    from thinwire.lab.report.palette import INK, MUTED
    from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, plain

    columns = columns or len(panels)
    rows = -(-len(panels) // columns)
    figure = canvas(max(7.2, 0.8 + 3.4 * columns), 1.2 + (2.9 if rows == 1 else 2.2) * rows)
    styles = _styles([each for panel in panels for each in panel.lines], reference)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=shared)
    for place, (axes, panel) in enumerate(zip(grid.flat, panels, strict=False)):
        for method, several in panel.lines.items():
            for each in several:
                _line(axes, styles[method], each, size)
        for level in panel.levels:
            axes.axhline(level, color=MUTED.light, linestyle=":", linewidth=1)
        _scale(axes, panel)
        axes.set_title(panel.title, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, x=panel.x, y="" if shared and place % columns else panel.y)
    _legend(figure, styles)
    return Picture(name, figure, title, caption, f"{title}: {', '.join(styles)}.")


def bars(
    name: str,
    panels: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]],
    *,
    title: str,
    caption: str,
    y: str = "",
    middle: Callable[[Sequence[float]], float] = fmean,
    form: str = "",
    reference: str = "",
) -> Picture:
    """Draw groups of bars, by panel, group and method: the middle of the values, from the least to the greatest.

    Args:
        name: of the file.
        panels: the values.
        title: of the picture.
        caption: what a reader must know.
        y: label of the axis along y.
        middle: of the values.
        form: in which each bar's middle is written above it; not at all unless given.
        reference: the method that looks as PyTorch's own does elsewhere.
    """
    from thinwire.lab.report.palette import INK
    from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, plain

    figure = canvas(max(7.2, 3.6 * len(panels)), 4.0)
    styles = _styles([method for groups in panels.values() for each in groups.values() for method in each], reference)
    width = 0.8 / len(styles)
    for axes, (panel, groups) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for i, (method, look) in enumerate(styles.items()):
            values = [each[method] for each in groups.values()]
            middles = [middle(each) for each in values]
            at = [place + (i - (len(styles) - 1) / 2) * width for place in range(len(groups))]
            # A mean of equal values may be a rounding off them.
            off = [[max(0.0, m - min(v)), max(0.0, max(v) - m)] for m, v in zip(middles, values, strict=True)]
            errors: dict[str, Any] = {"yerr": list(zip(*off, strict=True)), "capsize": 3}
            errors = errors if max(map(len, values)) > 1 else {}
            axes.bar(at, middles, width * 0.92, color=look.tone.light, **errors)
            for x, m, each in zip(at, middles, values, strict=True) if form else ():
                above: dict[str, Any] = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
                axes.annotate(format(m, form), (x, max(each)), fontsize=FONT_SIZE - 1, **above)
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set_title(panel, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, y=y, grid="y")
    _legend(figure, styles)
    return Picture(name, figure, title, caption, f"{title}: {', '.join(styles)}.")


def _styles(names: Sequence[str], reference: str) -> dict[str, Look]:
    from thinwire.lab.report.palette import looks

    unique = list(dict.fromkeys(names))
    return dict(zip(unique, looks(["ddp" if name == reference else name for name in unique]), strict=True))


def _legend(figure: Any, styles: Mapping[str, Look]) -> None:
    from thinwire.lab.report.picture import key, legend

    if len(styles) > 1:
        legend(figure, [key(look) for look in styles.values()], list(styles))


def _line(axes: Axes, look: Look, each: Line, size: float) -> None:
    from thinwire.lab.report.picture import line

    values = {x: [y] if isinstance(y, int | float) else list(y) for x, y in each.items()}
    line(axes, look, list(values), [fmean(seeds) for seeds in values.values()], size=size)
    for x, seeds in values.items():
        if len(seeds) > 1:
            axes.vlines(x, min(seeds), max(seeds), color=look.tone.light, lw=1)


def _scale(axes: Axes, panel: Panel) -> None:
    """Ticks and logarithmic scales, whose ones, twos and fives are written out upwards."""
    from matplotlib.ticker import FuncFormatter

    from thinwire.lab.report.picture import log_axis

    if "x" in panel.log and panel.ticks:
        log_axis(axes, panel.ticks)
    elif "x" in panel.log:
        axes.set_xscale("log")
    elif panel.ticks:
        axes.set_xticks(list(panel.ticks))
    if "y" in panel.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 1000 * low:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _one_two_five(value)))


def _one_two_five(value: float) -> str:
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""
