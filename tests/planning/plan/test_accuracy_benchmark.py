# SPDX-License-Identifier: Apache-2.0
"""How `benchmarks.accuracy` tunes each recipe before it counts its steps, with curves that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks import accuracy
from benchmarks.accuracy import AVERAGED, RATES, SETTINGS, TUNING_SEED, Run, Table, steps_to
from thinwire.errors import NonFiniteError
from thinwire.planning.plan.candidates import DENSE

SLOPES = {0.5: 0.01, 1.0: 0.02, 2.0: 0.015}


def curve(run: Run, *, steps: int, target: float | None = None) -> list[float]:
    """Losses fall in a line, fastest at the task's own rate; four times that diverges."""
    if run.rate not in SLOPES:
        raise NonFiniteError("the loss is NaN")
    slope = SLOPES[run.rate] * (1.0 if run.recipe == DENSE else 0.8)
    found: list[float] = []
    for place in range(steps // SETTINGS[run.task].every):
        found.append(2.0 - slope * place)
        if target is not None and accuracy.reached(found, target):
            break
    return found


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> tuple[Table, list[int]]:
    monkeypatch.setattr(accuracy, "losses", curve)
    kept: list[int] = []

    def keep(lines: Sequence[Any]) -> None:
        kept.append(len(lines))

    return Table([], keep), kept


def test_each_recipe_is_counted_at_its_best_rate_and_each_line_kept_once(table: tuple[Table, list[int]]) -> None:
    found, kept = table
    line = found.line(found.best("LocalSGD(period=8)", "digits", 0))
    dense = found.line(found.best(DENSE, "digits", 0))
    assert (line["rate"], dense["rate"]) == (1.0, 1.0)
    assert line["target_loss"] == dense["last_loss"] and dense["steps"] == 240 and line["steps"] > 240
    # Both recipes' tries, and both runs.
    assert kept == list(range(1, 2 * (len(RATES) + 1) + 1))
    assert sum(each["seed"] == TUNING_SEED for each in found.lines) == 2 * len(RATES)
    assert [each["steps"] for each in found.lines if each["rate"] == 4.0] == [None, None]
    found.line(found.best("LocalSGD(period=8)", "digits", 0))
    assert kept[-1] == len(found.lines)


def test_steps_are_those_to_the_first_mean_of_three_below_the_target() -> None:
    assert steps_to([3.0, 2.0, 1.0, 0.0], 2.0, 8) == 8 * AVERAGED
    assert steps_to([3.0, 2.0, 1.0, 0.0], 0.5, 8) is None and steps_to([], None, 8) is None
