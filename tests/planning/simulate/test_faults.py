# SPDX-License-Identifier: Apache-2.0
"""Invariants hold in every run with random faults.

`python -m tests.planning.simulate.faults` tries any number of seeds.
"""

from __future__ import annotations

import pytest

from tests.battery.cases import is_first
from tests.battery.runs import Case
from tests.planning.simulate.faults import CASES, MORE, PRESERVING, Seen, try_mass, try_seed
from thinwire import BackupWorkers, Strategy


def test_invariants_hold_under_random_faults_and_rare_events_are_seen() -> None:
    seen = Seen()
    for each in dict.fromkeys([*filter(is_first, CASES), *CASES[-len(MORE) :]]):
        try_seed(each, 0, seen)
    assert not seen.wrong
    for event in ("late drop", "stale message", "dead peer", "silent death", "pause", "late message"):
        assert seen.events[event], event


def test_backup_workers_go_on_and_agree_where_one_has_died() -> None:
    (case,) = (each for each in CASES if each.strategy == BackupWorkers(backups=1))
    seen = Seen()
    try_seed(case, 2, seen)
    assert not seen.wrong
    assert seen.events["survivor"] >= 2


@pytest.mark.parametrize("strategy", PRESERVING, ids=str)
def test_mass_is_neither_made_nor_lost(strategy: Strategy) -> None:
    seen = Seen()
    for seed in range(3):
        try_mass(strategy, seed, seen)
    assert not seen.wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("each", CASES, ids=str)
def test_invariants_hold_for_many_seeds(each: Case) -> None:
    seen = Seen()
    for seed in range(300):
        try_seed(each, seed, seen)
    assert not seen.wrong
