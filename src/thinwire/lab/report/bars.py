# SPDX-License-Identifier: Apache-2.0
"""The time of a mean step, split into compute and exposed communication: one stacked bar per strategy."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from thinwire.lab.report.files import Facts, number
from thinwire.lab.report.labels import shortened
from thinwire.lab.report.palette import COMPUTE, INK, MUTED, ON_WAIT, PAPER, WAIT, Look, Tone
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, is_narrow, note, plain, seconds_axis, swatches
from thinwire.lab.report.runs import Collection
from thinwire.planning import units

_NARROWEST_WITH_WORDS = 0.07
_PARTS: tuple[tuple[Tone, str], ...] = ((COMPUTE, "compute"), (WAIT, "exposed communication"))


@dataclass(frozen=True)
class Split:
    """A mean step in seconds, and its two parts."""

    total: float
    compute: float
    exposed: float


def split(summary: Facts) -> Split | None:
    """Return the parts of a summary's mean step; None where its duration is not known."""
    total = number(summary, "seconds_per_step")
    if total is None:
        return None
    compute, exposed = (number(summary, f"{part}_seconds_per_step") or 0.0 for part in ("compute", "exposed"))
    return Split(total, compute, exposed)


def time_picture(collection: Collection, styles: Sequence[Look]) -> Picture | None:
    """Return one stacked bar per strategy; None where no run knows how long its steps took."""
    splits = [split(run.summary) for run in collection.runs]
    longest = max((parts.total for parts in splits if parts is not None), default=0.0)
    if longest <= 0:
        return None
    figure = canvas(10.8, 0.95 + 0.46 * len(splits))
    axes = figure.add_subplot()
    plain(axes, x="time per step", grid="x")
    for row, parts in enumerate(splits):
        _bar(axes, row, parts, longest)
    _names(axes, collection, styles)
    seconds_axis(axes, longest * 1.12)
    swatches(figure, [Patch(color=tone.light, label=word) for tone, word in _PARTS], ncols=len(_PARTS))
    words = [
        f"{run.label}: {'not measured' if parts is None else _in_words(parts)}"
        for run, parts in zip(collection.runs, splits, strict=True)
    ]
    return Picture(
        name="time-per-step",
        figure=figure,
        title="Where a step's time goes",
        caption="The mean step. Exposed communication is the time a worker waited for messages; communication that "
        "overlaps with computation costs no time and is not in it. Compute is all the rest: the passes, the optimizer, "
        "the data and the loop.",
        description=f"Stacked bars of the time per step. {'; '.join(words)}.",
    )


def _in_words(parts: Split) -> str:
    compute, exposed = units.seconds(parts.compute), units.seconds(parts.exposed)
    return f"{units.seconds(parts.total)}, of which {compute} compute and {exposed} exposed communication"


def _bar(axes: Axes, row: int, parts: Split | None, longest: float) -> None:
    if parts is None:
        note(axes, " not measured", (0, row), va="center", color=MUTED.light)
        return
    left = 0.0
    for (tone, _), ink, width in zip(_PARTS, (PAPER, ON_WAIT), (parts.compute, parts.exposed), strict=True):
        axes.barh(row, width, left=left, height=0.62, color=tone.light, edgecolor=PAPER.light, linewidth=0.6)
        if width > _NARROWEST_WITH_WORDS * longest and parts.total:
            words = units.share(width / parts.total)
            axes.text(left + width / 2, row, words, ha="center", va="center", fontsize=FONT_SIZE - 1, color=ink.light)
        left += width
    note(axes, units.seconds(parts.total), (left, row), (5, 0), va="center", fontweight="bold")


def _names(axes: Axes, collection: Collection, styles: Sequence[Look]) -> None:
    most = 18 if is_narrow() else 36
    axes.set_yticks(range(len(collection.runs)), [shortened(run.label, most) for run in collection.runs])
    axes.set_ylim(len(collection.runs) - 0.45, -0.55)
    axes.tick_params(axis="y", pad=18, labelcolor=INK.light)
    beside = {"xycoords": axes.get_yaxis_transform(), "ha": "right", "va": "center", "fontsize": FONT_SIZE + 1}
    for row, look in enumerate(styles):
        note(axes, "■", (0, row), (-6, 0), color=look.tone.light, **beside)
