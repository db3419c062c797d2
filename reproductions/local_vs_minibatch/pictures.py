# SPDX-License-Identifier: Apache-2.0
"""Minibatch against local steps, drawn: the gap to the optimum over rounds, and over heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from reproductions.local_vs_minibatch.grid import METHODS, Cell, Grid
from thinwire.lab.report.palette import Look, looks
from thinwire.lab.report.picture import Picture, canvas, key, legend, line, log_axis, plain

_LOOKS = dict(zip(METHODS, looks(list(METHODS)), strict=True))


def rounds_picture(grid: Grid) -> Picture:
    """The gap against the rounds: a row for each number of steps in a round, a column for each share."""
    shares, periods, rounds = _axes_of(grid)
    figure = canvas(2.3 * len(shares) + 0.8, 2.0 * len(periods) + 0.9)
    panels = figure.subplots(len(periods), len(shares), sharex=True, sharey=True, squeeze=False)
    for row, period in enumerate(periods):
        for column, share in enumerate(shares):
            axes = panels[row][column]
            for method, look in _LOOKS.items():
                _line(axes, look, {r: grid[method, Cell(share, period, r)].mean for r in rounds})
            log_axis(axes, rounds)
            _plain_numbers(axes)
            last, first = row == len(periods) - 1, column == 0
            plain(axes, x="rounds" if last else "", y=f"gap, K = {period}" if first else "")
            if not row:
                axes.set_title(f"{share:.0%} own digits", fontsize=9)
    legend(figure, [key(look) for look in _LOOKS.values()], list(_LOOKS))
    return Picture(
        "rounds",
        figure,
        "Distance to the optimum over rounds",
        "The loss above its least, mean over seeds; K gradients a machine and round, every method at its best rate.",
        "Small multiples of the gap to the optimum against rounds for four methods.",
    )


def heterogeneity_picture(grid: Grid) -> Picture:
    """The gap over minibatch's, against the share of own digits, where rounds are longest."""
    shares, periods, rounds = _axes_of(grid)
    figure = canvas(3.4 * len(rounds) + 0.6, 3.6)
    panels = figure.subplots(1, len(rounds), sharey=True, squeeze=False)[0]
    for axes, r in zip(panels, rounds, strict=True):
        for place, (method, look) in enumerate(_LOOKS.items()):
            means: dict[float, float] = {}
            for share in shares:
                cell = Cell(share, periods[-1], r)
                reference = grid[METHODS[0], cell].mean
                gaps = [gap / reference for gap in grid[method, cell].gaps]
                where = 100 * share + 1.2 * (place - 1.5)
                means[where] = sum(gaps) / len(gaps)
                axes.vlines(where, min(gaps), max(gaps), color=look.tone.light, lw=1)
            _line(axes, look, means)
        _plain_numbers(axes)
        plain(axes, x="own digits, percent", y="gap / minibatch's gap" if axes is panels[0] else "")
        axes.set_title(f"{r} rounds of {periods[-1]}", fontsize=9)
    legend(figure, [key(look) for look in _LOOKS.values()], list(_LOOKS))
    return Picture(
        "heterogeneity",
        figure,
        "What heterogeneity does to local steps",
        "Gaps over minibatch's in the longest rounds; bars reach from the best seed to the worst.",
        "The gap of four methods relative to minibatch SGD's against the share of a machine's own digits.",
    )


def _axes_of(grid: Grid) -> tuple[list[float], list[int], list[int]]:
    cells = [cell for _, cell in grid]
    return (
        sorted({cell.share for cell in cells}, reverse=True),
        sorted({cell.period for cell in cells}),
        sorted({cell.rounds for cell in cells}),
    )


def _line(axes: Axes, look: Look, values: Mapping[float, float] | Mapping[int, float]) -> None:
    line(axes, look, list(values), list(values.values()))


def _plain_numbers(axes: Axes) -> None:
    """A logarithmic scale upwards, whose ones, twos and fives are written out."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
