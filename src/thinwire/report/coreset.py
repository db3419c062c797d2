"""A coreset to look at: all points from their widest side, the chosen among them as large as they weigh."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.report import units
from thinwire.report.document import card, document, figure
from thinwire.report.files import write_text
from thinwire.report.palette import MUTED, OTHER, PAPER, looks
from thinwire.report.picture import FONT_SIZE, Picture, canvas, plain

_MOST_DRAWN = 3000
_LARGEST_AREA = 260.0
_INK_AREA = 20_000.0
Points = NDArray[Any]


def write_coreset(
    folder: Path,
    others: Points,
    chosen: Points,
    weights: Points,
    share: float,
    *,
    title: str,
    rows: Sequence[tuple[str, str, str]],
) -> Path:
    """Write `report.html` and `plots/coreset.png`, and return the page's path.

    Args:
        folder: where.
        others: [m, 2]; points in the plane of the picture.
        chosen: [k, 2]; the chosen ones.
        weights: [k].
        share: of the variance that the plane shows.
        title: of the page.
        rows: (what, of the coreset, of random points).

    Raises:
        ConfigError: the folder cannot be written to.
    """
    picture = coreset_picture(others, chosen, weights, share)
    picture.png(folder / "plots")
    return write_text(folder / "report.html", _page(title, rows, picture))


def coreset_picture(others: Points, chosen: Points, weights: Points, share: float) -> Picture:
    """The chosen over the others; of more than 3,000 the heaviest are drawn."""
    heaviest = np.argsort(-weights, kind="stable")[:_MOST_DRAWN]
    figure = canvas(7.6, 5.4)
    axes = figure.add_subplot()
    plain(axes, x="first principal component", y="second principal component")
    axes.scatter(others[:, 0], others[:, 1], s=3, color=OTHER.light, linewidths=0)
    axes.scatter(
        chosen[heaviest, 0],
        chosen[heaviest, 1],
        s=min(_LARGEST_AREA, _INK_AREA / len(chosen)) * weights[heaviest] / weights.max(),
        color=looks(["AllReduce"])[0].tone.light,
        alpha=0.6,
        edgecolors=PAPER.light,
        linewidths=0.4,
    )
    seen = f"{units.share(share)} of the variance"
    axes.set_title(seen, loc="right", fontsize=FONT_SIZE - 1, color=MUTED.light)
    left_out = "" if len(heaviest) == len(chosen) else f" Of the chosen the {len(heaviest):,} heaviest are drawn."
    return Picture(
        name="coreset",
        figure=figure,
        title="Who stands for whom",
        caption=f"Points, grey, in the plane in which they differ most, with {seen}; each chosen point as large as the "
        f"number of points it speaks for.{left_out}",
        description=f"Scatter plot of {len(others):,} points and {len(chosen):,} chosen ones, which weigh from "
        f"{weights.min():g} to {weights.max():g}.",
    )


def _page(title: str, rows: Sequence[tuple[str, str, str]], picture: Picture) -> str:
    lines = "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td><td>{escape(c)}</td></tr>" for a, b, c in rows)
    head = "<tr><th></th><th>coreset</th><th>random</th></tr>"
    table = f"<table><thead>{head}</thead><tbody>{lines}</tbody></table>"
    return document(
        title,
        "thinwire select",
        card("Beside random points", f'<div class="scroll">{table}</div>') + card(picture.title, figure(picture)),
    )
