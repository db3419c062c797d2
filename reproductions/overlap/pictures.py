# SPDX-License-Identifier: Apache-2.0
"""Overlap Local-SGD beside its relatives, drawn: who waits how much, and loss against the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from reproductions.shared.charts import Panel, bars, lines, nested

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def waiting_picture(shares: Mapping[tuple[str, str], Sequence[float]]) -> Picture:
    """The share of time in which workers only wait: a group of bars for each kind of workers, medians of rounds."""
    return bars(
        "waiting",
        {"": nested(shares)},
        y="share of time spent waiting",
        middle=median,
        form=".1%",
        title="How much of the time workers only wait",
        caption="Medians of rounds; bars reach from the least to the greatest round.",
    )


def loss_picture(losses: Mapping[tuple[str, str], Mapping[float, Sequence[float]]]) -> Picture:
    """Held-out loss of every method against its learning rate, on like and on unlike data."""
    rates = sorted(next(iter(losses.values())))
    panels = [
        Panel(words, {name: [trials] for name, trials in each.items()}, "learning rate", "held-out loss", "xy", rates)
        for words, each in nested(losses).items()
    ]
    title = "Held-out loss after the same number of steps"
    return lines("loss", panels, title=title, caption="Means over seeds.", shared=True)
