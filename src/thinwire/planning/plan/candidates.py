# SPDX-License-Identifier: Apache-2.0
"""The recipes that a plan looks at, and what each costs in accuracy, as measured.

Both are data. A recipe is added by a line in `CANDIDATES`; `python -m benchmarks.accuracy` then measures it, and writes
`accuracy.json` beside this file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.methods.strategies.recipe import parse

DENSE = "AllReduce()"
CANDIDATES: tuple[str, ...] = (
    DENSE,
    "AllReduce(codec=Bf16())",
    "AllReduce(codec=Quantize(8))",
    "AllReduce(codec=PowerSGD(rank=4))",
    "AllReduce(codec=ErrorFeedback(OneBit()))",
    "PushSum()",
    "PushSum(staleness=1)",
    "Gossip(topology=Ring())",
    "LocalSGD(period=4)",
    "LocalSGD(period=8)",
    "OverlapLocalSGD(period=8)",
    "LocalSGD(period=8, codec=Quantize(4))",
    "OverlapLocalSGD(period=8, codec=ErrorFeedback(Nearest(bits=4)))",
    "DiLoCo(period=8, delay=4, mixing=0.5, codec=ErrorFeedback(Nearest(bits=4)))",
    "SlowMo(base=PushSum(), period=48)",
    "SlowMo(period=16)",
    "LocalSGD(period=32)",
    "DiLoCo(period=32)",
    "DiLoCo(period=32, codec=Quantize(4))",
    "DiLoCo(period=32, fragments=2, delay=8, mixing=0.5, codec=ErrorFeedback(Nearest(bits=4)))",
)
"""From those that change training least to those that send least: of equals, a plan takes the first."""

TABLE = Path(__file__).with_name("accuracy.json")


@dataclass(frozen=True)
class Accuracy:
    """How many steps a recipe needed for the loss that AllReduce() reached, as a multiple of AllReduce()'s.

    A run that did not reach the loss in the steps that it had counts as one that never does.

    Attributes:
        factor: mean over tasks and seeds; infinite if a run did not reach the loss.
        least: of the runs that reached the loss; infinite if none did.
        most: of the runs that reached the loss; infinite if none did.
        runs: how many.
        missed: how many of them did not reach the loss.
        rates: by task, the learning rate that it did best with, as a multiple of the one that AllReduce() did.
    """

    factor: float
    least: float
    most: float
    runs: int
    missed: int
    rates: Mapping[str, float] = field(default_factory=dict[str, float])

    def words(self) -> str:
        """Describe the factor in a few words, for a table.

        Example:
            >>> print(Accuracy(1.2, 1.1, 1.3, 5, 0).words())
            1.20 (1.10 to 1.30)
            >>> print(Accuracy(inf, 1.1, 1.3, 5, 2).words())
            never in 2 of 5 runs (others 1.10 to 1.30)
            >>> print(Accuracy(inf, inf, inf, 5, 5).words())
            never in 5 of 5 runs
        """
        spread = f" ({'others ' * bool(self.missed)}{self.least:.2f} to {self.most:.2f})"
        factor = f"never in {self.missed} of {self.runs} runs" if self.missed else f"{self.factor:.2f}"
        return factor + spread * (self.missed < self.runs)


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
        """Return what was measured for a recipe; None if it was not."""
        return self.rows.get(repr(parse(recipe)))


@cache
def measured(*, tuned: bool = True) -> AccuracyTable:
    """Return the table that comes with the package.

    Args:
        tuned: each recipe at the best of the learning rates that were tried; False for all at `AllReduce()`'s best.
    """
    return read_table(json.loads(TABLE.read_text(encoding="utf-8")), tuned=tuned)


def read_table(content: Mapping[str, Any], *, tuned: bool = True) -> AccuracyTable:
    """Read what `benchmarks.accuracy` has written; for the arguments see `measured`."""
    # A table without tries is of runs at the task's own rate.
    every: list[dict[str, Any]] = [{"rate": 1.0, **run} for run in content["runs"]]
    tries: list[dict[str, Any]] = content.get("tries", every)
    dense = {run["task"]: run["rate"] for run in every if run["recipe"] == DENSE}
    # Whatever the rate, it was tried with one seed, which is apart from those of the runs.
    found = every if tuned else [run for run in tries if run["rate"] == dense.get(run["task"])]
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for run in found:
        runs.setdefault(repr(parse(run["recipe"])), []).append(run)
    rows = {recipe: _row(each, dense) for recipe, each in runs.items()}
    return AccuracyTable(content["provenance"], content["command"], rows)


def _row(runs: Sequence[Mapping[str, Any]], dense: Mapping[str, float]) -> Accuracy:
    factors = [inf if run["steps"] is None else run["steps"] / run["dense_steps"] for run in runs]
    reached = [each for each in factors if each < inf]
    rates = {run["task"]: run["rate"] / dense[run["task"]] for run in runs if run["task"] in dense}
    least, most = min(reached, default=inf), max(reached, default=inf)
    return Accuracy(fmean(factors), least, most, len(runs), len(runs) - len(reached), rates)
