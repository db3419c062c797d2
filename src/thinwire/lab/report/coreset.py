# SPDX-License-Identifier: Apache-2.0
"""The page of `thinwire select`: all points in the plane of most variance, chosen points as large as their weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.core import units
from thinwire.lab.report.document import write_table
from thinwire.lab.report.palette import MUTED, OTHER, PAPER, looks
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, plain

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
        folder: where to write.
        others: [m, 2]; all points, or a random sample of them, in the plane of the picture.
        chosen: [k, 2]; chosen points.
        weights: [k]; their weights, the number of points that each represents.
        share: the fraction of the variance that the plane shows.
        title: of the page.
        rows: of the table: (name, figure of the coreset, figure of random subsets).

    Raises:
        ConfigError: the folder cannot be written to.
    """
    picture = coreset_picture(others, chosen, weights, share)
    heading, headings = "Compared with random subsets", ("", "coreset", "random")
    return write_table(folder, picture, heading, headings, rows, title=title, command="thinwire select")


def coreset_picture(others: Points, chosen: Points, weights: Points, share: float) -> Picture:
    """Return a scatter plot of the chosen points over the others; of more than 3,000 the heaviest are drawn."""
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
    # Every point is represented once.
    count = round(float(weights.sum()))
    shown = "All points" if len(others) == count else f"{len(others):,} random ones of all {count:,} points"
    return Picture(
        name="coreset",
        figure=figure,
        title="The chosen points among all points",
        caption=f"{shown}, grey, on their first two principal components, with {seen}; the area of each chosen "
        f"point is its weight, the number of points it represents.{left_out}",
        description=f"Scatter plot of {len(others):,} points and {len(chosen):,} chosen ones, which weigh from "
        f"{units.count(weights.min())} to {units.count(weights.max())}.",
    )
