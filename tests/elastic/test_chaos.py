# SPDX-License-Identifier: Apache-2.0
"""A few of the runs of `python -m benchmarks.chaos`, which sends random faults to real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos import plan_of


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_faults_break_no_rule() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", "--runs", "3", "--seed", "1"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "3 runs with seed 1" in found.stdout and "0 runs with violations" in found.stdout


def test_plans_follow_the_seed_and_spare_one_worker() -> None:
    plans = [plan_of(0, number) for number in range(300)]
    assert plans == [plan_of(0, number) for number in range(300)] != [plan_of(1, number) for number in range(300)]
    for plan in plans:
        hit = {fault.worker for fault in plan.faults if fault.kind in ("kill", "term", "long stop")}
        assert set(range(plan.size)) - hit
    assert {fault.kind for plan in plans for fault in plan.faults} == {"kill", "term", "stop", "long stop", "join"}
