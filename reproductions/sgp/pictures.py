# SPDX-License-Identifier: Apache-2.0
"""Plots of gossip and the methods it is compared with: loss against seconds, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.shared.charts import Panel, bars, lines, nested
from reproductions.shared.curves import Curve

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

# By condition and method: one curve for each round.
Curves = Mapping[tuple[str, str], Sequence[Curve]]


def loss_picture(curves: Curves) -> Picture:
    """Held-out loss against seconds of training, a panel for each condition, a line for each round."""
    panels = [
        Panel(
            condition,
            {name: [curve.by_second for curve in rounds] for name, rounds in each.items()},
            "seconds of training",
            "held-out loss",
        )
        for condition, each in nested(curves).items()
    ]
    return lines(
        "loss",
        panels,
        title="Held-out loss against time",
        caption="All lines have the same number of steps: the sooner one ends, the faster the method.",
        shared=True,
        reference="AllReduce",
    )


def pace_picture(curves: Curves) -> Picture:
    """The time of a step, and what of it is waiting, a panel for each condition."""
    figures = {"a step": "seconds_per_step", "waiting in it": "exposed_seconds_per_step"}
    times = {
        condition: {
            words: {name: [1000 * getattr(curve, key) for curve in rounds] for name, rounds in each.items()}
            for words, key in figures.items()
        }
        for condition, each in nested(curves).items()
    }
    return bars(
        "pace",
        times,
        y="milliseconds",
        form=".0f",
        title="What a step's time is spent on",
        caption="The rest of a step is computing, what a straggler adds included.",
        reference="AllReduce",
    )
