# SPDX-License-Identifier: Apache-2.0
"""A figure with its title and captions, as a PNG in light colours and as an SVG that follows the page's colours.

Figures are made and saved without pyplot, so no global state changes and no display is needed.
"""

import hashlib
import html
import io
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from thinwire.core import units
from thinwire.lab.report.files import write_bytes
from thinwire.lab.report.labels import shortened
from thinwire.lab.report.palette import GRID, INK, MUTED, PAPER, TONES, Look
from thinwire.lab.report.runs import Run

FONT_SIZE = 9.0
# In inches; on a telephone this is as wide as the screen, with text that can be read.
_NARROW = 4.2
_DOTS_PER_INCH = 160
_LEGEND_ROW = 0.19
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


_is_narrow: ContextVar[bool] = ContextVar("narrow", default=False)


def is_narrow() -> bool:
    """Whether pictures are drawn for a narrow screen."""
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
        """The figure as an SVG element for an HTML page that defines the palette's CSS variables."""
        content = io.StringIO()
        # Text stays text, and ids and metadata do not change from one writing to the next.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "thinwire"}):
            self.figure.savefig(content, format="svg", transparent=True, metadata=_NO_METADATA)
        return _inlined(content.getvalue(), self.name, self.description)


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


def legend(figure: Figure, handles: list[Line2D], names: list[str], *, title: str = "") -> None:
    """One legend above the axes, in as few rows as its names allow; the figure grows by its height, and a title's."""
    words = [shortened(name, 46) for name in names]
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


def key(look: Look) -> Line2D:
    """A strategy's line and marker for the legend."""
    return Line2D(
        [], [], color=look.tone.light, linestyle=look.line, linewidth=look.width, marker=look.marker, markersize=5
    )


def seconds_axis(axes: Axes, longest: float) -> None:
    """Durations along x, from 0 to `longest` seconds, in one unit."""
    axes.set_xlim(0, longest)
    if is_narrow():
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: units.tick(value, longest)))


def heading(axes: Axes, run: Run, look: Look, *, most: int, note: str = "") -> None:
    """Write a run's colour and label, cut to `most` characters, above the axes at the left, and a note at the right.

    On a narrow screen there is room for one of the two: the label.
    """
    most, note = (min(most, 34), "") if is_narrow() else (most, note)
    _above(axes, "■", 0, look.tone.light)
    _above(axes, shortened(run.label, most), 13, INK.light, weight="bold")
    if note:
        axes.set_title(note, loc="right", fontsize=FONT_SIZE - 1, color=MUTED.light)


def _above(axes: Axes, words: str, points: float, colour: str, *, weight: str = "normal") -> None:
    axes.annotate(
        words,
        (0, 1),
        xycoords="axes fraction",
        xytext=(points, 6),
        textcoords="offset points",
        fontsize=FONT_SIZE,
        color=colour,
        fontweight=weight,
    )


def _plain_name(name: str) -> str:
    """A name without what has a meaning in HTML, in paths or in patterns; different names stay different."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:80]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _inlined(document: str, name: str, description: str) -> str:
    """An SVG document as an element of an HTML page, in the page's colours and typeface."""
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
