# SPDX-License-Identifier: Apache-2.0
"""Slow momentum beside its bases, drawn: loss against the learning rate, and the losses of every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.shared.charts import Panel, bars, lines
from reproductions.slowmo.steps import Figures, Runs

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def tuning_picture(runs: Runs) -> Picture:
    """Held-out loss of every trial against its learning rate; a line joins those of one recipe."""
    rates = sorted({trial.lr for trials in runs.values() for trial in trials})
    found = {
        name: [
            {t.lr: [each.held_out_loss for each in trials[t]] for t in trials if t.recipe == recipe}
            for recipe in dict.fromkeys(trial.recipe for trial in trials)
        ]
        for name, trials in runs.items()
    }
    return lines(
        "tuning",
        [Panel("", found, "learning rate", "held-out loss, nats", "xy", rates)],
        title="Held-out loss against the learning rate",
        caption="Each method was given the same number of trials. Of two lines in one colour, one keeps the workers' "
        "momentum and one forgets it.",
    )


def loss_picture(ended: Mapping[str, Sequence[Figures]]) -> Picture:
    """Training and held-out loss, method by method."""
    losses = {
        words: {"": {name: [getattr(each, key) for each in seeds] for name, seeds in ended.items()}}
        for words, key in (("training loss", "train_loss"), ("held-out loss", "held_out_loss"))
    }
    caption = "Every method at its best trial; means over seeds, from the least to the greatest."
    return bars("losses", losses, y="nats", title="Losses after the same number of steps", caption=caption)
