# SPDX-License-Identifier: Apache-2.0
"""Leaders and springs drawn: loss against time, who led, and where they go down a hill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.lsgd.landscapes import EVERY, Descent
from reproductions.shared.charts import Panel, bars, lines
from reproductions.shared.curves import Curve

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def loss_picture(curves: Mapping[str, Sequence[Curve]]) -> Picture:
    """Held-out loss against seconds of training, a line for each round."""
    found = {name: [curve.by_second for curve in rounds] for name, rounds in curves.items()}
    return lines(
        "loss",
        [Panel("", found, "seconds of training", "held-out loss, nats", "y")],
        title="Held-out loss against time",
        caption="All methods have the same time over the same link, each at its own learning rate.",
    )


def leaders_picture(led: Mapping[str, Sequence[int]]) -> Picture:
    """How often each worker led all of them."""
    won = {name: {f"worker {rank}": [count] for rank, count in enumerate(counts)} for name, counts in led.items()}
    caption = "Workers whose data are alike should lead about equally often."
    return bars("leaders", {"": won}, y="elections won", title="How often each worker led", caption=caption)


def well_picture(descents: Mapping[str, Descent]) -> Picture:
    """Where two workers of a double well are after each step, a panel for each recipe."""
    panels = [
        Panel(
            name,
            {f"worker {k}": [dict(enumerate(descent.places[:, k, 0].tolist()))] for k in (0, 1)},
            "step",
            "place",
            levels=(-1, 1),
        )
        for name, descent in descents.items()
    ]
    return lines(
        "double-well",
        panels,
        title="Two workers, two wells",
        caption="Minima at 1 and at -1 (dotted), a hill between them. A strong spring keeps both workers off their "
        "minima and the centre on the hill; a leader stands in its minimum, and a strong pull brings the other over.",
        shared=True,
        size=0,
    )


def completion_picture(losses: Mapping[str, Sequence[Descent]]) -> Picture:
    """The loss of what would be shipped, against steps, a line for each matrix."""
    found = {
        name: [{EVERY * i: y for i, y in enumerate(each.shipped.tolist())} for each in descents]
        for name, descents in losses.items()
    }
    return lines(
        "completion",
        [Panel("", found, "step", "loss of the shipped factors", "y")],
        title="Matrix completion",
        caption="Four workers begin apart. A spring's centre is a mean of factors that fit the matrix in different "
        "ways; a leader is one of them.",
        size=0,
    )
