# SPDX-License-Identifier: Apache-2.0
"""Elastic workers as processes: SIGKILL of any of them, rank 0 too, and one that comes later."""

from __future__ import annotations

import pytest

from tests.elastic.processes import Processes, Report
from tests.grids import fast_where

RECIPES = ("AllReduce()", "LocalSGD(period=4)", "SlowMo(period=4)", "DiLoCo(period=4)", "PushSum(staleness=1)")


def finished(reports: list[Report], size: int) -> None:
    """All have ended without an error, in one view of that size, with one model."""
    for report in reports:
        assert not report.error, report.error
        assert report.agreed is not None and report.agreed == reports[0].agreed
        assert report.views[-1][1:] == (reports[0].views[-1][1], size)


@pytest.mark.parametrize(
    "recipe", fast_where(lambda recipe: recipe in ("AllReduce()", "PushSum(staleness=1)"), RECIPES)
)
def test_of_two_workers_one_is_killed_and_the_other_goes_on(recipe: str) -> None:
    processes = Processes(recipe, 2, steps=16, seconds=0.01)
    processes.until(0, 5)
    processes.kill(0)
    finished(processes.finish()[1:], 1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_of_four_workers_any_is_killed_and_the_others_go_on(recipe: str, victim: int) -> None:
    processes = Processes(recipe, 4, steps=20, seconds=0.01)
    processes.until(victim, 6)
    processes.kill(victim)
    reports = processes.finish()
    finished([report for number, report in enumerate(reports) if number != victim], 3)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_worker_is_killed_and_another_takes_its_place(recipe: str) -> None:
    processes = Processes(recipe, 3, steps=400, seconds=0.01)
    processes.until(1, 5)
    processes.kill(0)
    processes.start(0)
    finished(processes.finish()[1:], 3)


def test_workers_stop_in_words_when_the_store_is_gone() -> None:
    processes = Processes("LocalSGD(period=2)", 2, steps=100_000, seconds=0.002)
    processes.until(0, 5)
    processes.end_store()
    processes.kill(1)
    (report, _) = processes.finish()
    assert "the store of the worker list cannot be reached" in report.error
