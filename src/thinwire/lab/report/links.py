# SPDX-License-Identifier: Apache-2.0
"""The bytes that each worker's link carried, next to the payload that the strategy sent."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator

from thinwire.core import units
from thinwire.lab.report.files import number
from thinwire.lab.report.palette import INK, MUTED, PAPER, Look
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, heading, is_narrow, note, plain, swatches
from thinwire.lab.report.runs import Collection, Link, Run

# Characters of a panel's heading, by panels in a row.
_HEADING_LENGTH = {3: 26, 2: 44}


def link_picture(collection: Collection, styles: Sequence[Look]) -> Picture | None:
    """A small chart for each run that counted the bytes of its links, all on one scale; None where no run did."""
    counted = [(run, look) for run, look in zip(collection.runs, styles, strict=True) if run.links]
    links = [link for run, _ in counted for link in run.links]
    most = max(
        (
            value
            for link in links
            for value in (link.sent_bytes, link.received_bytes, link.payload_sent_bytes)
            if value is not None
        ),
        default=0.0,
    )
    if most <= 0:
        return None
    per_row = 3 if max(len(run.label) for run, _ in counted) <= _HEADING_LENGTH[3] else 2
    per_row = 1 if is_narrow() else per_row
    rows, across = -(-len(counted) // per_row), min(per_row, len(counted))
    tallest = max(len(run.links) for run, _ in counted)
    figure = canvas(10.8, 0.5 + rows * (0.9 + 0.36 * tallest))
    figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.07, hspace=0.1, wspace=0.06)
    grid = figure.subplots(rows, across, squeeze=False)
    for axes in grid.flat[len(counted) :]:
        axes.set_visible(False)
    for axes, (run, look) in zip(grid.flat, counted, strict=False):
        _panel(axes, run, look, most=most, room=_HEADING_LENGTH.get(per_row, 34))
    keys = [
        Patch(facecolor=INK.light, label="sent (wire)"),
        Patch(facecolor=INK.light, alpha=0.4, label="received (wire)"),
        Patch(facecolor=MUTED.light, edgecolor=PAPER.light, label="payload sent (thin)"),
    ]
    swatches(figure, keys, ncols=2 if is_narrow() else 3)
    return Picture(
        name="links",
        figure=figure,
        title="What each link carried",
        caption="Whole run, per worker. Sent and received are the counters of the network interface, which include "
        "packet headers and acknowledgements; payload is what the strategy sent, counted from its tensors. The share "
        "used is the mean rate of sending over the run, divided by the link's rate.",
        description=_description(collection),
    )


def used(run: Run) -> float | None:
    """Return the mean fraction of the links' rates that the workers used for sending; None where it is not known."""
    seconds = number(run.summary, "seconds")
    shares = [
        8 * link.sent_bytes / (link.bits_per_second * seconds)
        for link in run.links
        if link.sent_bytes is not None and link.bits_per_second and seconds
    ]
    return sum(shares) / len(shares) if shares else None


def rates(run: Run) -> str:
    """Return the links' rates in words: one if all are equal, otherwise the slowest and the fastest."""
    known = sorted({link.bits_per_second for link in run.links if link.bits_per_second})
    if not known:
        return run.other_links
    if len(known) == 1:
        return units.rate(known[0])
    return f"{units.rate(known[0])} to {units.rate(known[-1])}"


def _panel(axes: Axes, run: Run, look: Look, *, most: float, room: int) -> None:
    share = used(run)
    plain(axes, x=rates(run) + ("" if share is None else f", {units.share(share)} used"), grid="x")
    heading(axes, run, look, most=room)
    colour = look.tone.light
    for row, link in enumerate(run.links):
        axes.barh(row - 0.24, link.sent_bytes or 0, height=0.26, color=colour)
        _amount(axes, row - 0.24, link.sent_bytes)
        axes.barh(row + 0.03, link.received_bytes or 0, height=0.26, color=colour, alpha=0.4)
        axes.barh(row + 0.27, link.payload_sent_bytes or 0, height=0.14, color=MUTED.light)
    axes.set_yticks(range(len(run.links)), [_tick(link, run) for link in run.links])
    axes.set_ylim(len(run.links) - 0.5, -0.55)
    axes.set_xlim(0, most * 1.22)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def _amount(axes: Axes, row: float, nbytes: float | None) -> None:
    words = "not measured" if nbytes is None else units.nbytes(nbytes)
    note(axes, words, (nbytes or 0, row), (4, 0), va="center", fontsize=FONT_SIZE - 1.5, color=MUTED.light)


def _tick(link: Link, run: Run) -> str:
    """Return the worker, with its link's rate where rates differ."""
    equal = len({other.bits_per_second for other in run.links}) == 1
    rate = "" if equal or not link.bits_per_second else f"\n{units.rate(link.bits_per_second)}"
    return f"worker {link.rank}{rate}"


def _description(collection: Collection) -> str:
    parts: list[str] = []
    for run in collection.runs:
        for link in run.links:
            sent, received, payload = (
                "not measured" if value is None else units.nbytes(value)
                for value in (link.sent_bytes, link.received_bytes, link.payload_sent_bytes)
            )
            parts.append(f"{run.label} worker {link.rank}: {sent} sent, {received} received, {payload} payload")
    return f"Bars of the bytes each worker's link carried. {'; '.join(parts)}."
