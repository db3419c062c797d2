# SPDX-License-Identifier: Apache-2.0
"""Simulated rounds under schedules of faults lose what can be computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.faults import ALL, LATE, Fault, Storm, goodput, kills, schedule, work

CALM = Storm(workers=4, seconds=1000.0, round_seconds=10.0, steps=10, back_seconds=35.0)


def test_without_faults_all_rounds_count() -> None:
    # A round takes 10 to 10.2 s, and the slowest of four ends it.
    useful, effective = work(CALM, [], ALL)
    assert useful == effective
    assert 4 * 97 <= useful <= 4 * 100


def test_a_kill_costs_the_rounds_in_which_the_worker_is_missing() -> None:
    # Killed within round k and back 35 s later, within round k + 3, it joins at that one's end: four rounds are lost.
    useful = work(CALM, [Fault(502.0, "kill", 1)], ALL)[0]
    assert work(CALM, [], ALL)[0] - useful == 4


def test_survivors_wait_until_they_notice() -> None:
    kill = [Fault(502.0, "kill", 1)]
    # All of them wait 20 s longer, which are two rounds of three workers.
    waited = work(CALM, kill, ALL)[0] - work(CALM, kill, ALL, notice_seconds=30.0)[0]
    assert 2 * 3 - 1 <= waited <= 3 * 3


def test_a_stopped_worker_is_left_out_once_the_others_are_out_of_patience() -> None:
    stop = [Fault(502.0, "stop", 2), Fault(602.0, "cont", 2)]
    calm = work(CALM, [], ALL)[0]
    # Left out, it misses about ten rounds; waited for, all four would.
    assert 10 <= calm - work(CALM, stop, ALL)[0] <= 16
    # Late merging takes its one piece of work later, discounted by its age.
    useful, effective = work(CALM, stop, LATE)
    assert effective < useful < calm


def test_the_last_worker_is_not_killed_and_work_continues_after_all_stood_still() -> None:
    one = replace(CALM, workers=2)
    faults = [Fault(100.0, "stop", 0), Fault(130.0, "kill", 1), Fault(140.0, "kill", 0), Fault(200.0, "cont", 0)]
    assert goodput(one, faults, ALL)[0] > 0.7


@pytest.mark.parametrize(("name", "kinds"), [("k120", (25, 9, 9)), ("k60", (56, 7, 11)), ("n32", (30, 9, 9))])
def test_published_schedules_are_whole(name: str, kinds: tuple[int, int, int]) -> None:
    faults = schedule(name)
    count = tuple(sum(each.kind == kind for each in faults) for kind in ("kill", "stop", "partition"))
    assert count == kinds
    assert [each.at for each in faults] == sorted(each.at for each in faults)


def test_drawn_kills_have_their_rate() -> None:
    assert 400 < len(kills(8, 30_000.0, 60.0, seed=1)) < 600
