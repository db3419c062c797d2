# SPDX-License-Identifier: Apache-2.0
"""Pictures of what training on subsets comes to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from reproductions.craig.deep import DeepCourse
from reproductions.craig.incremental import Course
from thinwire.core.storage.files import write_atomically

_COLOURS = {"full": "#4e4a54", "craig": "#bf3600", "random": "#0068b5", "weighted": "#6b4fbb", "strata": "#12965a"}
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)))


def available() -> bool:
    """Whether pictures can be drawn here."""
    return find_spec("matplotlib") is not None


def draw_residuals(path: Path, title: str, courses: Mapping[str, Mapping[str, Course]], target: float) -> None:
    """What is left of the way to the optimum against gradients of single samples, one column a method.

    The line is the target.

    Args:
        path: of the PNG.
        title: the data.
        courses: by method, then by arm, such as "craig 10%".
        target: the residual aimed at.
    """
    figure, axes = _panels(len(courses))
    for axis, (method, arms) in zip(axes, courses.items(), strict=True):
        for arm, course in arms.items():
            pairs = zip(course.evaluations, course.residuals, strict=True)
            looks = [(x, left) for x, left in pairs if x > 0 and 0 < left < math.inf]
            if looks:
                axis.plot(*zip(*looks, strict=True), **_look(arm, list(arms)), label=arm)
        axis.axhline(target, color="#5b6675", linewidth=0.8)
        axis.set(title=f"{title}: {method.upper()}", xscale="log", yscale="log", xlabel="gradients of single samples")
    axes[0].set_ylabel("loss above the optimum, of the start's")
    axes[-1].legend(fontsize=7, frameon=False)
    _keep(figure, path)


def draw_floors(path: Path, title: str, fractions: Sequence[float], floors: Mapping[str, Sequence[float]]) -> None:
    """How far the optimum of each subset is from that of all the data, against the subset's size."""
    figure, (axis,) = _panels(1)
    for arm, values in floors.items():
        axis.plot([100 * f for f in fractions], values, marker="o", color=_COLOURS[arm.split()[0]], label=arm)
    axis.axhline(0.01, color="#5b6675", linewidth=0.8)
    axis.set(title=f"{title}: optimum of the subset", yscale="log", xlabel="points in the subset, %")
    axis.set_ylabel("loss above the optimum, of the start's")
    axis.legend(frameon=False)
    _keep(figure, path)


def draw_accuracies(path: Path, title: str, courses: Mapping[str, DeepCourse]) -> None:
    """Held-out errors against seconds and against points seen."""
    figure, axes = _panels(2)
    for arm, course in courses.items():
        look = {**_look(arm, list(courses)), "marker": "."}
        errors = [1 - accuracy for accuracy in course.accuracies]
        axes[0].plot(course.seconds, errors, **look, label=arm)
        axes[1].plot(course.points, errors, **look, label=arm)
    axes[0].set(title=title, xlabel="seconds, selections included", ylabel="errors on held-out data", yscale="log")
    axes[1].set(title=title, xlabel="points seen")
    axes[0].legend(fontsize=7, frameon=False)
    _keep(figure, path)


def _panels(count: int, *, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.0 + 3.9 * count, 3.6 * rows), layout="constrained")
    axes = list(figure.subplots(rows, count, squeeze=False, sharey=True).flat)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e4e8ee", linewidth=0.6)
    return figure, axes


def _look(arm: str, arms: Sequence[str]) -> dict[str, Any]:
    """A colour for each way of choosing, and a dash for each size."""
    kind = arm.split()[0]
    place = [other for other in arms if other.split()[0] == kind].index(arm)
    return {"color": _COLOURS[kind], "linestyle": _DASHES[place % len(_DASHES)], "linewidth": 1.4}


def _keep(figure: Any, path: Path) -> None:
    image = BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_atomically(path, image.getvalue())


def in_words(seconds: float) -> str:
    """Seconds with three digits, or that there are none."""
    return f"{seconds:.3g} s" if math.isfinite(seconds) else "never"
