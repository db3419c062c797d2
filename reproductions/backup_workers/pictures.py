# SPDX-License-Identifier: Apache-2.0
"""Backup workers against waiting for all and for nobody, drawn: loss against time, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.backup_workers.race import Ran
from reproductions.shared.charts import Panel, bars, lines, nested

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

Chosen = Mapping[tuple[str, str], Sequence[Ran]]
"""Of (which workers are late, method): its races at the best learning rate, one for each seed."""


def time_picture(chosen: Chosen) -> Picture:
    """Held-out loss against seconds, the first seed of every method."""
    panels = [
        Panel(
            condition,
            {name: [dict(zip(rans[0].seconds, rans[0].losses, strict=True))] for name, rans in each.items()},
            x="seconds",
            y="held-out loss",
            log="y",
        )
        for condition, each in nested(chosen).items()
    ]
    caption = "One seed, each method at a learning rate of its own unless another is named."
    return lines("time", panels, title="Held-out loss against time", caption=caption, shared=True, size=0)


def ends_picture(chosen: Chosen) -> Picture:
    """What every method ends with: a group of bars for each kind of late workers, means of seeds."""
    ends = {c: {name: [ran.end for ran in rans] for name, rans in each.items()} for c, each in nested(chosen).items()}
    caption = "Means over seeds of the last three looks; bars reach from the least to the greatest."
    return bars("ends", {"": ends}, y="held-out loss", title="Held-out loss after the same time", caption=caption)
