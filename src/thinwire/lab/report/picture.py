# SPDX-License-Identifier: Apache-2.0
"""A figure with its title and captions, as a PNG in light colours and as an SVG that follows the page's colours.

Figures are made and saved without pyplot, so no global state changes and no display is needed.
"""

import hashlib
import html
import io
import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cbook import STEP_LOOKUP_MAP
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from thinwire.lab.report.files import write_bytes, write_text
from thinwire.lab.report.labels import shortened
from thinwire.lab.report.palette import GRID, INK, MUTED, PAPER, TONES, Look
from thinwire.lab.report.runs import Run
from thinwire.planning import units

FONT_SIZE = 9.0
# In inches; on a telephone this is as wide as the screen, with text that can be read.
_NARROW = 4.2
_DOTS_PER_INCH = 160
_LEGEND_ROW = 0.19
# In points, between a point and its label.
_DISTANCES, _NEXT_TO = (7, 12, 20, 30, 42, 56, 72), 14
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


_is_narrow: ContextVar[bool] = ContextVar("narrow", default=False)


def is_narrow() -> bool:
    """Return True if pictures are drawn for a narrow screen."""
    return _is_narrow.get()


@contextmanager
def narrow() -> Generator[None]:
    """Within it, pictures are drawn for a narrow screen."""
    token = _is_narrow.set(True)
    try:
        yield
    finally:
        _is_narrow.reset(token)


@dataclass(frozen=True)
class Picture:
    """A figure, its file's stem, its title, a caption, and a description for screen readers.

    The name is also part of ids and of a path: all but alphanumerics, points, hyphens and underlines is replaced.
    """

    name: str
    figure: Figure
    title: str
    caption: str
    description: str

    def __post_init__(self) -> None:
        """Lay the figure out once, so that PNG and SVG are the same."""
        # Ids in a page must differ between the drawings for wide and for narrow screens.
        object.__setattr__(self, "name", _plain_name(self.name) + ("-narrow" if is_narrow() else ""))
        for text in self.figure.findobj(Text):
            # Names of runs and metrics are no formulas; matplotlib's own, such as powers of ten, are.
            if "\\mathdefault" not in text.get_text():
                text.set_parse_math("$" not in text.get_text())
        self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")

    def png(self, folder: Path) -> Path:
        """Write `<name>.png` into a folder and return its path."""
        content = io.BytesIO()
        self.figure.savefig(content, format="png", dpi=_DOTS_PER_INCH, facecolor=PAPER.light)
        return write_bytes(folder / f"{self.name}.png", content.getvalue())

    def svg(self) -> str:
        """Return the figure as an SVG element for an HTML page that defines the palette's CSS variables."""
        return _inlined(_as_svg(self.figure, "none", transparent=True), self.name, self.description)


def write_svg(figure: Figure, path: Path) -> Path:
    """Write a figure in light colors on white, with its text as outlines, and return its path."""
    return write_text(path, _as_svg(figure, "path", facecolor=PAPER.light))


def _as_svg(figure: Figure, fonts: str, **form: Any) -> str:
    content = io.StringIO()
    # Ids and metadata do not change from one writing to the next.
    with matplotlib.rc_context({"svg.fonttype": fonts, "svg.hashsalt": "thinwire"}):
        figure.savefig(content, format="svg", metadata=_NO_METADATA, **form)
    return content.getvalue()


def canvas(width: float, height: float) -> Figure:
    """An empty figure of a size in inches, laid out so that its labels fit; no wider than a narrow screen allows."""
    figure = Figure(figsize=(min(width, _NARROW) if is_narrow() else width, height))
    figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.07)
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes, *, x: str = "", y: str = "", grid: str = "both") -> None:
    """Remove the frame and the tick marks; keep a light grid along `both`, `x` or `y`."""
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    if grid in ("both", "x"):
        axes.grid(True, axis="x", color=GRID.light, linewidth=0.8)
    if grid in ("both", "y"):
        axes.grid(True, axis="y", color=GRID.light, linewidth=0.8)
    axes.tick_params(which="both", length=0, labelsize=FONT_SIZE, colors=MUTED.light)
    axes.set_xlabel(x, fontsize=FONT_SIZE, color=MUTED.light)
    axes.set_ylabel(y, fontsize=FONT_SIZE, color=MUTED.light)


def legend(figure: Figure, handles: list[Line2D], names: list[str], *, title: str = "", most: int = 46) -> None:
    """One legend above the axes, in as few rows as its names allow; the figure grows by its height, and a title's."""
    words = [shortened(name, most) for name in names]
    # About 13 characters per inch, and 6 for the sample and the gap.
    room = figure.get_figwidth() * 13
    per_row = max(1, min(len(words), int(room // (max(map(len, words)) + 6))))
    rows = -(-len(words) // per_row)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (rows - 1 + bool(title)))
    figure.legend(
        handles,
        words,
        loc="outside upper left",
        ncols=per_row,
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=INK.light,
        handlelength=1.8,
        columnspacing=1.6,
        title=title or None,
        title_fontproperties={"size": FONT_SIZE + 1},
        alignment="left",
    )


@dataclass(frozen=True)
class Label:
    """Words for a point of a drawing, in data coordinates, and their color."""

    words: str
    x: float
    y: float
    color: str = INK.light


def label(axes: Axes, labels: Sequence[Label], *, size: float = FONT_SIZE - 1) -> None:
    """Write labels beside their points, each where it covers least: no other label, and few points and lines.

    Call it when everything else is drawn and limits are set. A label that is not next to its point gets a thin line.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)  # there are no subfigures here
    figure.draw_without_rendering()
    frame, points = axes.get_window_extent(), figure.dpi / 72
    drawn = np.concatenate([_dots(axes), axes.transData.transform([(each.x, each.y) for each in labels])])
    taken: list[Bbox] = []
    for each in labels:
        at = axes.transData.transform((each.x, each.y))
        text = axes.annotate(
            each.words, (each.x, each.y), xytext=(0, 0), textcoords="offset points", fontsize=size, color=each.color
        )
        extent = text.get_window_extent()
        width, height = extent.width + 2 * points, extent.height
        best: tuple[float, float, float, Bbox] | None = None
        for far in _DISTANCES:
            for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False):
                right, up = far * points * np.cos(angle), far * points * np.sin(angle)
                left = at[0] + right - (width if right < -1e-6 else 0.0)
                bottom = at[1] + up - height / 2
                box = Bbox.from_bounds(left, bottom, width, height)
                outside = max(0.0, frame.x0 - box.x0, box.x1 - frame.x1) + max(
                    0.0, frame.y0 - box.y0, box.y1 - frame.y1
                )
                hidden = sum(box.overlaps(other) for other in taken)
                cost = 100 * hidden + outside + box.count_contains(drawn) + far / 20
                if best is None or cost < best[0]:
                    best = cost, left - at[0], bottom - at[1], box
        assert best is not None
        _, right, up, box = best
        taken.append(box)
        text.set_position((right / points, up / points))
        if min(abs(right), abs(right + width)) > _NEXT_TO * points or abs(up + height / 2) > _NEXT_TO * points:
            side = right if right > 0 else min(right + width, 0.0)
            axes.annotate(
                "",
                (each.x, each.y),
                xytext=(side / points, (up + height / 2) / points),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": each.color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2},
            )


def _dots(axes: Axes) -> NDArray[np.float64]:
    """Places along every line of some axes, close to each other, in pixels."""
    found = [np.empty((0, 2))]
    for line in axes.lines:
        steps = STEP_LOOKUP_MAP[line.get_drawstyle()](*np.asarray(line.get_data(), dtype=np.float64))
        corners = axes.transData.transform(np.column_stack(list(steps)))
        corners = corners[np.isfinite(corners).all(1)]
        for start, end in pairwise(corners):
            found.append(np.linspace(start, end, 2 + min(200, int(np.hypot(*(end - start)) // 8))))
    return np.concatenate(found)


def note(axes: Axes, words: str, at: tuple[float, float], offset: tuple[float, float] = (0, 0), **look: Any) -> None:
    """Write words at a place of some axes, moved by an offset in points."""
    style: dict[str, Any] = {"fontsize": FONT_SIZE, "color": INK.light, **look}
    axes.annotate(words, at, xytext=offset, textcoords="offset points", **style)


def swatches(on: Figure | Axes, handles: Sequence[Patch], **look: Any) -> None:
    """Write a legend of small squares, above the axes unless `loc` is given."""
    style: dict[str, Any] = {"loc": "outside upper left", "fontsize": FONT_SIZE, "labelcolor": INK.light, **look}
    on.legend(handles=list(handles), frameon=False, handlelength=1.0, handleheight=1.0, **style)


def key(look: Look) -> Line2D:
    """Return a strategy's line and marker for the legend."""
    return Line2D(
        [], [], color=look.tone.light, linestyle=look.line, linewidth=look.width, marker=look.marker, markersize=5
    )


def line(axes: Axes, look: Look, x: Sequence[float], y: Sequence[float], *, size: float = 4) -> list[Line2D]:
    """Draw a strategy's line with markers of a size in points."""
    style: dict[str, Any] = {"color": look.tone.light, "linestyle": look.line, "linewidth": look.width}
    return axes.plot(list(x), list(y), **style, marker=look.marker, markersize=size)


def log_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """Make the axis along x logarithmic, with just these ticks."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def seconds_axis(axes: Axes, longest: float) -> None:
    """Durations along x, from 0 to `longest` seconds, in one unit."""
    axes.set_xlim(0, longest)
    if is_narrow():
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value, longest)))


def heading(axes: Axes, run: Run, look: Look, *, most: int, right: str = "") -> None:
    """Write a run's colour and label, cut to `most` characters, above the axes at the left, and words at the right.

    On a narrow screen there is room for one of the two: the label.
    """
    most, title = (min(most, 34), "") if is_narrow() else (most, right)
    note(axes, "■", (0, 1), (0, 6), xycoords="axes fraction", color=look.tone.light)
    note(axes, shortened(run.label, most), (0, 1), (13, 6), xycoords="axes fraction", fontweight="bold")
    if title:
        axes.set_title(title, loc="right", fontsize=FONT_SIZE - 1, color=MUTED.light)


def _plain_name(name: str) -> str:
    """Return a name without what has a meaning in HTML, in paths or in patterns; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _inlined(document: str, name: str, description: str) -> str:
    """Return an SVG document as an element of an HTML page, in the page's colours and typeface."""
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    box = re.search(r'viewBox="([^"]+)"', body)
    label = html.escape(description, quote=True)
    opening = f'<svg class="picture" viewBox="{box[1] if box else ""}" role="img" aria-label="{label}">'
    body = re.sub(r"<svg[^>]*>", lambda _: opening, body, count=1)
    # Ids must be unique in a page, and matplotlib gives the same ones to every figure.
    body = body.replace("xlink:href", "href")
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]+)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    for tone in TONES:
        body = body.replace(tone.light, f"var({tone.variable})")
    # The page's typeface instead of matplotlib's.
    return re.sub(r"(font(?:-family)?:[^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1var(--font)", body).strip()
