# SPDX-License-Identifier: Apache-2.0
"""Arrays of models drawn: their pace beside other ways of training, and their losses beside those of separate runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from reproductions.hfta.losses import Losses
from reproductions.hfta.training import WAYS, Paces, speedup
from reproductions.shared.charts import Panel, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

_LEAST = 1e-17


def pace_picture(found: Paces) -> Picture:
    """Steps of single models in a second, over those of one process after another, against the number of models."""
    panels = [
        Panel(
            title,
            {
                words: [{size: speedup(paces, way, "process") for size, paces in sizes.items()}]
                for way, words in WAYS.items()
            },
            "models",
            "pace over one at a time",
            ticks=list(sizes),
        )
        for title, sizes in found.items()
    ]
    return lines(
        "pace",
        panels,
        columns=3,
        title="Throughput of many models",
        caption="Steps of single models in a second, over those of one process after another on the same cores.",
    )


def difference_picture(found: Mapping[str, Losses]) -> Picture:
    """How far losses are apart after each step, in fp64 and fp32, beside what rounding alone does in fp32."""
    ways = {
        "an array, fp64": "difference",
        "an array, fp32": "short_difference",
        "separate runs one rounding apart, fp32": "short_drift",
    }
    panels = [
        Panel(
            title,
            {words: [dict(enumerate(getattr(each, key).clamp(min=_LEAST).tolist()))] for words, key in ways.items()},
            "step",
            "difference / first loss",
            "y",
        )
        for title, each in found.items()
    ]
    return lines(
        "differences",
        panels,
        columns=3,
        title="How far losses are from those of separate runs",
        caption="The largest of any model, of its first loss. In fp32 rounding also grows between separate runs that "
        "begin one rounding apart.",
        size=0,
    )
