# SPDX-License-Identifier: Apache-2.0
"""Minibatch against local steps, drawn: the gap to the optimum over rounds, and over heterogeneity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reproductions.local_vs_minibatch.grid import METHODS, Cell, Grid
from reproductions.shared.charts import Panel, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture


def rounds_picture(grid: Grid) -> Picture:
    """The gap against the rounds: a row for each number of steps in a round, a column for each share."""
    shares, periods, rounds = _axes_of(grid)
    panels = [
        Panel(
            f"{share:.0%} own digits, K = {period}",
            {method: [{r: grid[method, Cell(share, period, r)].mean for r in rounds}] for method in METHODS},
            "rounds",
            "gap",
            "xy",
            rounds,
        )
        for period in periods
        for share in shares
    ]
    return lines(
        "rounds",
        panels,
        columns=len(shares),
        title="Distance to the optimum over rounds",
        caption="The loss above its least, mean over seeds; K gradients a machine and round, every method at its best "
        "rate.",
        shared=True,
    )


def heterogeneity_picture(grid: Grid) -> Picture:
    """The gap over minibatch's, against the share of own digits, where rounds are longest."""
    shares, periods, rounds = _axes_of(grid)

    def gaps(method: str, share: float, r: int) -> list[float]:
        cell = Cell(share, periods[-1], r)
        return [gap / grid[METHODS[0], cell].mean for gap in grid[method, cell].gaps]

    panels = [
        Panel(
            f"{r} rounds of {periods[-1]}",
            {
                method: [{100 * share + 1.2 * (place - 1.5): gaps(method, share, r) for share in shares}]
                for place, method in enumerate(METHODS)
            },
            "own digits, percent",
            "gap / minibatch's gap",
            "y",
        )
        for r in rounds
    ]
    title, caption = "What heterogeneity does to local steps", "Gaps over minibatch's in the longest rounds."
    return lines("heterogeneity", panels, title=title, caption=caption, shared=True)


def _axes_of(grid: Grid) -> tuple[list[float], list[int], list[int]]:
    cells = [cell for _, cell in grid]
    return (
        sorted({cell.share for cell in cells}, reverse=True),
        sorted({cell.period for cell in cells}),
        sorted({cell.rounds for cell in cells}),
    )
