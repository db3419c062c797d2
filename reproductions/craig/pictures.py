# SPDX-License-Identifier: Apache-2.0
"""Pictures of what training on subsets comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reproductions.craig.deep import DeepCourse
from reproductions.craig.incremental import Course
from reproductions.shared.charts import Panel, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def residual_picture(stem: str, title: str, courses: Mapping[str, Mapping[str, Course]], target: float) -> Picture:
    """What is left of the way to the optimum against gradients of single samples, one column a method.

    Args:
        stem: of the file's name.
        title: the data.
        courses: by method, then by arm, such as "craig 10%".
        target: the residual aimed at, a dotted line.
    """
    panels = [
        Panel(
            method.upper(),
            {
                arm: [{x: y for x, y in zip(each.evaluations, each.residuals, strict=True) if x and 0 < y < math.inf}]
                for arm, each in arms.items()
            },
            "gradients of single samples",
            "loss above the optimum, of the start's",
            "xy",
            levels=(target,),
        )
        for method, arms in courses.items()
    ]
    caption = "The first seed of each arm; the dotted line is the target."
    return lines(f"{stem}-residual", panels, title=title, caption=caption, shared=True, size=0)


def floor_picture(
    stem: str, title: str, fractions: Sequence[float], floors: Mapping[str, Sequence[float]], target: float
) -> Picture:
    """How far the optimum of each subset is from that of all the data, against the subset's size."""
    found = {arm: [{100 * f: y for f, y in zip(fractions, each, strict=True)}] for arm, each in floors.items()}
    panel = Panel("", found, "points in the subset, %", "loss above the optimum, of the start's", "y", levels=(target,))
    return lines(f"{stem}-floors", [panel], title=f"{title}: optimum of the subset", caption="Medians over seeds.")


def accuracy_picture(task: str, courses: Mapping[str, DeepCourse]) -> Picture:
    """Held-out errors against seconds and against points seen."""
    panels = [
        Panel(
            "",
            {
                arm: [{x: 1 - y for x, y in zip(getattr(each, along), each.accuracies, strict=True)}]
                for arm, each in courses.items()
            },
            words,
            "errors on held-out data",
            "y",
        )
        for along, words in (("seconds", "seconds, selections included"), ("points", "points seen"))
    ]
    return lines(f"{task}-accuracy", panels, title=task, caption="The first seed of each arm.", shared=True)
