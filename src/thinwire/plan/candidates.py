# SPDX-License-Identifier: Apache-2.0
"""The recipes that a plan looks at, and what each costs in accuracy, as measured.

Both are data. A recipe is added by a line in `CANDIDATES`; `python -m benchmarks.accuracy` then measures it, and writes
`accuracy.json` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.strategies.recipe import parse

CANDIDATES: tuple[str, ...] = (
    "AllReduce()",
    "AllReduce(codec=Bf16())",
    "AllReduce(codec=Quantize(8))",
    "AllReduce(codec=ErrorFeedback(OneBit()))",
    "PushSum()",
    "PushSum(staleness=1)",
    "Gossip(topology=Ring())",
    "LocalSGD(period=4)",
    "LocalSGD(period=8)",
    "OverlapLocalSGD(period=8)",
    "LocalSGD(period=8, codec=Quantize(4))",
    "DiLoCo(period=8, delay=4, mixing=0.5, codec=ErrorFeedback(Nearest(bits=4)))",
    "SlowMo(base=PushSum(), period=48)",
    "SlowMo(period=16)",
    "LocalSGD(period=32)",
    "DiLoCo(period=32)",
    "DiLoCo(period=32, codec=Quantize(4))",
)
"""From those that change training least to those that send least: of equals, a plan takes the first."""

TABLE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class Accuracy:
    """How many steps a recipe needed for the loss that AllReduce() reached, as a multiple of AllReduce()'s.

    Attributes:
        factor: mean over tasks and seeds; runs that did not reach the loss count with the most that they had.
        least: of all runs.
        most: of all runs.
        runs: how many.
        missed: how many of them did not reach the loss in the steps that they had.
    """

    factor: float
    least: float
    most: float
    runs: int
    missed: int

    def words(self) -> str:
        """In a few words, for a table."""
        spread = f"{self.least:.2f} to {self.most:.2f}"
        missed = f", {self.missed} of {self.runs} did not reach it" * bool(self.missed)
        return f"{self.factor:.2f} times the steps ({spread}{missed})"


@dataclass(frozen=True)
class AccuracyTable:
    """The measured table.

    Attributes:
        provenance: how it was measured, in one sentence.
        command: measures it again.
        rows: by recipe, as `repr` writes it.
    """

    provenance: str
    command: str
    rows: Mapping[str, Accuracy]

    def of(self, recipe: str) -> Accuracy | None:
        """What was measured for a recipe; None if it was not."""
        return self.rows.get(repr(parse(recipe)))


@cache
def measured() -> AccuracyTable:
    """The table that comes with the package."""
    return read_table(json.loads(TABLE.read_text(encoding="utf-8")))


def read_table(content: Mapping[str, Any]) -> AccuracyTable:
    """Read what `benchmarks.accuracy` has written."""
    factors: dict[str, list[float]] = {}
    missed: dict[str, int] = {}
    for run in content["runs"]:
        found = run["steps"] is not None
        recipe = repr(parse(run["recipe"]))
        factors.setdefault(recipe, []).append((run["steps"] if found else run["most_steps"]) / run["dense_steps"])
        missed[recipe] = missed.get(recipe, 0) + (not found)
    return AccuracyTable(
        content["provenance"],
        content["command"],
        {recipe: _row(each, missed[recipe]) for recipe, each in factors.items()},
    )


def _row(factors: Sequence[float], missed: int) -> Accuracy:
    return Accuracy(fmean(factors), min(factors), max(factors), len(factors), missed)
