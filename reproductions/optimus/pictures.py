# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism in one and two dimensions drawn: bytes, memory and time against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from reproductions.optimus.race import Finish
from reproductions.optimus.scaling import Row
from reproductions.optimus.transformer_layers import SCHEMES, Scheme
from reproductions.shared.charts import Line, Panel, bars, lines

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

NAMES: dict[Scheme, str] = {"1d": "one dimension", "1d+sequence": "one, sequence split", "2d": "two dimensions"}


def scaling_picture(rows: Sequence[Row]) -> Picture:
    """Bytes sent, memory, and the largest batch against ranks, from the formulas."""

    def panel(title: str, what: str, scale: float, **more: Sequence[Line]) -> Panel:
        found = {NAMES[s]: [{row.ranks: getattr(row, what)[s] / scale for row in rows}] for s in SCHEMES}
        return Panel(title, found | more, "ranks", log="xy", ticks=[row.ranks for row in rows])

    paper = {"two, the paper's storage": [{row.ranks: row.payload_bytes["2d, paper"] / 1e9 for row in rows}]}
    return lines(
        "scaling",
        [
            panel("sent a step, GB", "payload_bytes", 1e9, **paper),
            panel("held at most, GB", "peak_bytes", 1e9),
            panel("largest batch, tokens", "most_tokens", 1),
        ],
        title="A model that grows with the ranks",
        caption="From the formulas, which counted bytes and memory match; per rank, both axes logarithmic.",
    )


def race_picture(finish: Finish, link: str | None) -> Picture:
    """Bytes, memory and time of one step, as measured."""
    found: dict[str, dict[Scheme, list[float]]] = {
        "sent a step, MB": {s: [finish.payload_bytes(s) / 1e6] for s in SCHEMES},
        "held at most, MB": {s: [finish.peak_bytes(s) / 1e6] for s in SCHEMES},
        f"a step over {link or 'loopback'}, ms": {s: [1e3 * x for x in finish.seconds(s)] or [0.0] for s in SCHEMES},
    }
    stem = finish.race.stem
    return bars(
        "race",
        {title: {"": {NAMES[s]: values for s, values in each.items()}} for title, each in found.items()},
        middle=median,
        form=".0f",
        title=f"{finish.race.rows * finish.race.columns} processes, {stem.layers} layers of {stem.hidden}, "
        f"{stem.tokens} tokens",
        caption="Bytes and memory are the most of any rank; bars of times reach from the least round to the greatest.",
    )
