# SPDX-License-Identifier: Apache-2.0
"""Plots of 1-bit LAMB: held-out loss beside LAMB's, and the time of a step beside that of other methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.shared.charts import Panel, bars, lines
from reproductions.shared.curves import Curve

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def loss_picture(curves: Mapping[str, Sequence[Curve]], warm_steps: int) -> Picture:
    """Held-out loss against steps, a line for each round."""
    found = {name: [curve.by_step for curve in rounds] for name, rounds in curves.items()}
    return lines(
        "loss",
        [Panel("", found, "steps", "held-out loss")],
        title="Held-out loss, sample for sample",
        caption="All methods see the same samples in the same order. After the first "
        f"{warm_steps} steps the variance is frozen.",
    )


def pace_picture(seconds: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Seconds per step of every method: a group of bars for each link."""
    caption = "Of 1-bit LAMB and PowerSGD, the steps after their warm-up; bars reach from the least to the greatest."
    return bars("pace", {"": seconds}, y="seconds per step", form=".3g", title="What a step takes", caption=caption)
