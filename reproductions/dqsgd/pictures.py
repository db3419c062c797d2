# SPDX-License-Identifier: Apache-2.0
"""Plots of bits: accuracy against the bytes sent, and how a rule spends them over a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from reproductions.dqsgd.regression import Kept
from reproductions.dqsgd.thread_runs import Learned
from reproductions.shared.charts import Panel, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def accuracy_picture(name: str, runs: Mapping[str, Sequence[Learned]]) -> Picture:
    """Held-out accuracy against bits sent for each parameter and step: a mark for every method's mean."""
    found = {
        method: [{fmean(run.bits_per_entry for run in each): [run.accuracy for run in each]}]
        for method, each in runs.items()
    }
    return lines(
        name,
        [Panel("", found, "bits sent for each parameter and step", "held-out accuracy", "x")],
        title="Accuracy against bits",
        caption="Every mark is a method at its best learning rate, the line through it its seeds. Up and to the left "
        "is better.",
        size=7,
    )


def bits_picture(runs: Sequence[Kept]) -> Picture:
    """The bits of every step under a bound on the error, and the square of the gradients they were chosen by."""
    bits, squares = (
        {f"seed {i}": [dict(enumerate(getattr(run, what)))] for i, run in enumerate(runs)}
        for what in ("bits", "squares")
    )
    return lines(
        "bits",
        [Panel("", bits, "steps", "bits"), Panel("", squares, "steps", "gradients' square", "y")],
        title="Bits under a bound on the error",
        caption="Errors made early have time to fade, so they may be large.",
        size=0,
    )
