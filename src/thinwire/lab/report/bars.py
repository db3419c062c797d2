# SPDX-License-Identifier: Apache-2.0
"""The time of a mean step, split into compute, exposed communication and other: one stacked bar per strategy."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from thinwire.core import units
from thinwire.lab.report.files import Facts, number
from thinwire.lab.report.labels import shortened
from thinwire.lab.report.palette import COMPUTE, INK, MUTED, ON_WAIT, OTHER, PAPER, WAIT, Look, Tone
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, is_narrow, plain, seconds_axis
from thinwire.lab.report.runs import Collection

_NARROWEST_WITH_WORDS = 0.07
_PARTS: tuple[tuple[Tone, str], ...] = ((COMPUTE, "compute"), (WAIT, "exposed communication"), (OTHER, "other"))


@dataclass(frozen=True)
class Split:
    """A mean step in seconds: total, compute, exposed communication, and the rest."""

    total: float
    compute: float
    exposed: float
    other: float


def split(summary: Facts) -> Split | None:
    """The parts of a summary's mean step; None where its duration is not known."""
    total = number(summary, "seconds_per_step")
    if total is None:
        return None
    compute = number(summary, "compute_seconds_per_step") or 0.0
    exposed = number(summary, "exposed_seconds_per_step") or 0.0
    return Split(total, compute, exposed, max(0.0, total - compute - exposed))


def time_picture(collection: Collection, styles: Sequence[Look]) -> Picture | None:
    """One stacked bar per strategy; None where no run knows how long its steps took."""
    splits = [split(run.summary) for run in collection.runs]
    longest = max((parts.total for parts in splits if parts is not None), default=0.0)
    if longest <= 0:
        return None
    # In thinwire's own runs compute is all that is not waiting.
    whole = not any(parts.other > 0.001 * parts.total for parts in splits if parts is not None)
    figure = canvas(10.8, 0.95 + 0.46 * len(splits))
    axes = figure.add_subplot()
    plain(axes, x="time per step", grid="x")
    for row, parts in enumerate(splits):
        _bar(axes, row, parts, longest)
    _names(axes, collection, styles)
    seconds_axis(axes, longest * 1.12)
    figure.legend(
        handles=[Patch(color=tone.light, label=word) for tone, word in _PARTS if not (whole and tone is OTHER)],
        loc="outside upper left",
        ncols=len(_PARTS),
        frameon=False,
        fontsize=FONT_SIZE,
        labelcolor=INK.light,
        handlelength=1.0,
        handleheight=1.0,
    )
    words = [
        f"{run.label}: {'not measured' if parts is None else _in_words(parts, whole=whole)}"
        for run, parts in zip(collection.runs, splits, strict=True)
    ]
    return Picture(
        name="time-per-step",
        figure=figure,
        title="Where a step's time goes",
        caption="The mean step. Exposed communication is the time a worker waited for messages; communication that "
        "overlaps with computation costs no time and is not in it. "
        + (
            "Compute is all the rest: the passes, the optimizer, the data and the loop."
            if whole
            else "Other is what was recorded as neither."
        ),
        description=f"Stacked bars of the time per step. {'; '.join(words)}.",
    )


def _in_words(parts: Split, *, whole: bool) -> str:
    compute, exposed = (
        f"{units.seconds(parts.compute)} compute",
        f"{units.seconds(parts.exposed)} exposed communication",
    )
    split = f"{compute} and {exposed}" if whole else f"{compute}, {exposed} and {units.seconds(parts.other)} other"
    return f"{units.seconds(parts.total)}, of which {split}"


def _bar(axes: Axes, row: int, parts: Split | None, longest: float) -> None:
    if parts is None:
        axes.text(0, row, " not measured", va="center", fontsize=FONT_SIZE, color=MUTED.light)
        return
    left = 0.0
    inks = (PAPER, ON_WAIT, INK)
    for (tone, _), ink, width in zip(_PARTS, inks, (parts.compute, parts.exposed, parts.other), strict=True):
        axes.barh(row, width, left=left, height=0.62, color=tone.light, edgecolor=PAPER.light, linewidth=0.6)
        if width > _NARROWEST_WITH_WORDS * longest and parts.total:
            words = units.share(width / parts.total)
            axes.text(left + width / 2, row, words, ha="center", va="center", fontsize=FONT_SIZE - 1, color=ink.light)
        left += width
    axes.annotate(
        units.seconds(parts.total),
        (left, row),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=FONT_SIZE,
        fontweight="bold",
        color=INK.light,
    )


def _names(axes: Axes, collection: Collection, styles: Sequence[Look]) -> None:
    axes.set_yticks(
        range(len(collection.runs)), [shortened(run.label, 18 if is_narrow() else 36) for run in collection.runs]
    )
    axes.set_ylim(len(collection.runs) - 0.45, -0.55)
    axes.tick_params(axis="y", pad=18, labelcolor=INK.light)
    for row, look in enumerate(styles):
        axes.annotate(
            "■",
            (0, row),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=FONT_SIZE + 1,
            color=look.tone.light,
        )
