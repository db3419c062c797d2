# SPDX-License-Identifier: Apache-2.0
"""Timelines: when each worker computes, waits and has messages in flight, over the same length of time for all runs."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from thinwire.lab.report.files import Facts, number, text
from thinwire.lab.report.palette import COMMUNICATION, COMPUTE, MUTED, PAPER, WAIT, Look, Tone
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, heading, is_narrow, plain, seconds_axis, swatches
from thinwire.lab.report.runs import Collection, Run, Span
from thinwire.planning import units

_STEPS_OF_THE_SLOWEST = 3
_STEPS_OF_THE_FASTEST = 10
_SHORTEST_SECONDS = 1e-6
# Intervals closer than this fraction of the picture's width cannot be told apart, and are drawn as one.
_FINEST = 1 / 1500
_LEGEND = ((COMPUTE, "compute"), (WAIT, "wait"), (COMMUNICATION, "communication"))


@dataclass(frozen=True)
class Window:
    """A part of a run, in seconds since its common start."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return how long it is."""
        return self.end - self.start


def timeline_pictures(collection: Collection, styles: Sequence[Look]) -> dict[int, Picture]:
    """Return one picture for each run that recorded a timeline, by the run's index."""
    recorded = {index: run for index, run in enumerate(collection.runs) if run.spans}
    length = common_length([run.spans for run in recorded.values()])
    return {index: _picture(run, styles[index], index, length) for index, run in recorded.items()}


def common_length(timelines: Iterable[Sequence[Span]]) -> float:
    """Seconds to show of every run: three mean steps of the slowest run or ten of the fastest, whichever is longer."""
    means = [_mean_step(spans) for spans in timelines]
    if not means:
        return 0.0
    return max(_STEPS_OF_THE_SLOWEST * max(means), _STEPS_OF_THE_FASTEST * min(means), _SHORTEST_SECONDS)


def window(spans: Sequence[Span], length: float) -> Window:
    """Return the window of this length that is most typical of the whole timeline.

    It begins where the first worker begins a step, contains a message if the run has any, has about the same fraction
    of waiting as the whole timeline, and has few gaps, such as those of evaluations.
    """
    first, last = min(span.start for span in spans), max(span.end for span in spans)
    if last - first <= length:
        return Window(first, first + length)
    starts = [start for start in step_starts(spans) if start + length <= last] or [first]
    whole = Window(first, last)
    usual = _share(spans, whole, ("wait",)) / max(_share(spans, whole, ("wait", "compute")), _SHORTEST_SECONDS)
    messages = sorted(span.start for span in spans if span.kind == "communication")

    def difference(start: float) -> tuple[bool, float]:
        seen = Window(start, start + length)
        place = bisect_left(messages, start)
        without_message = bool(messages) and (place == len(messages) or messages[place] >= seen.end)
        waiting, gaps = _share(spans, seen, ("wait",)), 1 - _share(spans, seen, ("wait", "compute"))
        # Rounded, so that the earliest of equally typical windows is taken.
        return without_message, round(abs(waiting - usual) + gaps, 3)

    best = min(starts[:: max(1, len(starts) // 60)], key=difference)
    return Window(best, best + length)


def step_starts(spans: Sequence[Span]) -> list[float]:
    """When the worker of lowest rank began each of its steps, in order."""
    rank = min(span.rank for span in spans)
    starts: dict[int, float] = {}
    for span in spans:
        if span.rank == rank and span.kind == "compute":
            starts[span.step] = min(span.start, starts.get(span.step, math.inf))
    return sorted(starts.values())


def _mean_step(spans: Sequence[Span]) -> float:
    starts = step_starts(spans)
    if len(starts) < 2:
        return max(span.end for span in spans) - min(span.start for span in spans)
    return (starts[-1] - starts[0]) / (len(starts) - 1)


def _share(spans: Sequence[Span], seen: Window, kinds: tuple[str, ...]) -> float:
    """Return the fraction of a window that its workers spend in intervals of these kinds; 0 for an empty window."""
    ranks = len({span.rank for span in spans})
    parts = (max(0.0, min(s.end, seen.end) - max(s.start, seen.start)) for s in spans if s.kind in kinds)
    return sum(parts) / (ranks * seen.seconds) if seen.seconds else 0.0


def _picture(run: Run, look: Look, index: int, length: float) -> Picture:
    seen = window(run.spans, length)
    ranks = sorted({span.rank for span in run.spans})
    steps = sum(seen.start <= start < seen.end for start in step_starts(run.spans))
    waiting = units.share(_share(run.spans, seen, ("wait",)))
    note = f"{steps} steps in {units.seconds(seen.seconds)}; workers wait {waiting} of it"
    if slow := _slow_worker(run):
        note += f"; {slow}"
    figure = canvas(10.8, (1.25 if is_narrow() else 0.95) + 0.38 * len(ranks))
    axes = figure.add_subplot()
    plain(axes, grid="x")
    heading(axes, run, look, most=50, right=note)
    for row, rank in enumerate(ranks):
        # Waiting lies under computing, and messages, which overlap with both, in a lane of their own.
        lanes: tuple[tuple[str, Tone, float, float], ...] = (
            ("wait", WAIT, row - 0.36, 0.5),
            ("compute", COMPUTE, row - 0.36, 0.5),
            ("communication", COMMUNICATION, row + 0.19, 0.15),
        )
        for kind, tone, bottom, height in lanes:
            bars = intervals([span for span in run.spans if span.rank == rank and span.kind == kind], seen)
            axes.broken_barh(bars, (bottom, height), facecolor=tone.light, edgecolor=PAPER.light, linewidth=0.35)
    _frame(axes, ranks, seen)
    return Picture(
        name=f"timeline-{index + 1}",
        figure=figure,
        title=f"{run.label}: compute, communication and waiting",
        caption=note,
        description=f"Timeline of {len(ranks)} workers under {run.label}: {note}.",
    )


def _slow_worker(run: Run) -> str:
    """The worker that the others waited for in the run's last round with such a worker, in words; empty for none."""
    found = run.summary.get("slow_worker")
    facts: Facts = found if isinstance(found, dict) else {}
    rank, cost, cause = number(facts, "rank"), number(facts, "cost"), text(facts, "cause")
    if rank is None or cost is None or not cause:
        return ""
    return f"worker {int(rank)} costs the others {units.share(cost)} by its {cause}"


def intervals(spans: Sequence[Span], seen: Window) -> list[tuple[float, float]]:
    """Spans cut to a window, as (start, length) in seconds from its start; those too close to tell apart are joined."""
    merged: list[list[float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, seen.start) - seen.start, min(span.end, seen.end) - seen.start
        if end <= start:
            continue
        close = bool(merged) and start - merged[-1][1] < _FINEST * seen.seconds and span.kind != "compute"
        if close:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end - start) for start, end in merged]


def _frame(axes: Axes, ranks: Sequence[int], seen: Window) -> None:
    axes.set_yticks(range(len(ranks)), [f"worker {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.6)
    seconds_axis(axes, seen.seconds)
    # On a narrow screen the label above takes the whole width.
    place, anchor = ("upper center", (0.5, -0.16)) if is_narrow() else ("lower center", (0.5, 1.0))
    look = {"fontsize": FONT_SIZE - 1, "labelcolor": MUTED.light, "borderaxespad": 0.1, "columnspacing": 1.2}
    keys = [Patch(color=tone.light, label=words) for tone, words in _LEGEND]
    swatches(axes, keys, loc=place, bbox_to_anchor=anchor, ncols=3, **look)
