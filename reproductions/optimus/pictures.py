# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in one and two dimensions drawn: bytes, memory and time against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from reproductions.optimus.race import Finish
from reproductions.optimus.scaling import Row
from reproductions.optimus.transformer_layers import SCHEMES, Scheme
from thinwire.lab.report.palette import INK, MUTED, Look, looks
from thinwire.lab.report.picture import FONT_SIZE, Picture, canvas, key, legend, line, plain

NAMES: dict[Scheme, str] = {"1d": "one dimension", "1d+sequence": "one, sequence split", "2d": "two dimensions"}
_GIGABYTE = 1e9


def scaling_picture(rows: Sequence[Row]) -> Picture:
    """Bytes sent, memory, and the largest batch against ranks, from the formulas."""
    figure = canvas(10.8, 3.9)
    panels = figure.subplots(1, 3)
    ranks = [row.ranks for row in rows]
    for scheme, look in _looks().items():
        _line(panels[0], look, ranks, [row.payload_bytes[scheme] / _GIGABYTE for row in rows])
        _line(panels[1], look, ranks, [row.peak_bytes[scheme] / _GIGABYTE for row in rows])
        _line(panels[2], look, ranks, [float(row.most_tokens[scheme]) for row in rows])
    paper = [row.payload_bytes["2d, paper"] / _GIGABYTE for row in rows]
    panels[0].plot(ranks, paper, color=MUTED.light, linestyle=":", linewidth=1.4)
    panels[0].annotate("paper's storage", (ranks[-1], paper[-1]), fontsize=FONT_SIZE - 1, color=MUTED.light, ha="right")
    titles = ("sent a step, GB", "held at most, GB", "largest batch, tokens")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ranks, [str(p) for p in ranks])
        axes.set_title(title, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, x="ranks")
    legend(figure, [key(look) for look in _looks().values()], list(NAMES.values()))
    return Picture(
        "scaling",
        figure,
        "A model that grows with the ranks",
        "From the formulas, which counted bytes and memory match; per rank, both axes logarithmic.",
        "Bytes sent, memory and largest batch per rank against the number of ranks, for three ways of cutting.",
    )


def race_picture(finish: Finish, link: str | None) -> Picture:
    """Bytes, memory and time of one step, as measured."""
    figure = canvas(10.8, 2.3)
    panels = figure.subplots(1, 3, sharey=True)
    for row, (scheme, look) in enumerate(_looks().items()):
        seconds = finish.seconds(scheme)
        found = (finish.payload_bytes(scheme) / 1e6, finish.peak_bytes(scheme) / 1e6, 1e3 * _median(seconds))
        ends = (found[0], found[1], 1e3 * max(seconds, default=0.0))
        for axes, value, end in zip(panels, found, ends, strict=True):
            axes.barh(row, value, color=look.tone.light, height=0.62)
            axes.text(end, row, f"  {value:.0f}", va="center", fontsize=FONT_SIZE, color=MUTED.light)
        if seconds:
            panels[2].plot([1e3 * x for x in seconds], [row] * len(seconds), "|", color=INK.light, markersize=9)
    titles = ("sent a step, MB", "held at most, MB", f"a step over {link or 'loopback'}, ms")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontsize=FONT_SIZE, color=INK.light)
        plain(axes, grid="x")
        axes.margins(x=0.16)
    panels[0].set_yticks(range(len(NAMES)), list(NAMES.values()))
    panels[0].invert_yaxis()
    stem = finish.race.stem
    return Picture(
        "race",
        figure,
        f"{finish.race.rows * finish.race.columns} processes, {stem.layers} layers of {stem.hidden}, "
        f"{stem.tokens} tokens",
        "Bytes and memory are the most of any rank; ticks are single rounds.",
        "Bars of bytes, memory and time of a step for three ways of cutting.",
    )


def _looks() -> dict[Scheme, Look]:
    return dict(zip(SCHEMES, looks(["ddp", "LocalSGD()", "AllReduce()"]), strict=True))


def _line(axes: Axes, look: Look, x: Sequence[int], y: Sequence[float]) -> None:
    line(axes, look, x, y)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
