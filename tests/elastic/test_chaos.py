# SPDX-License-Identifier: Apache-2.0
"""A few of the runs of `python -m tests.elastic.chaos`, which sends random faults to real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elastic.chaos import SHARES, plan_of


def run(*options: str) -> str:
    """Run the program, which must find no violation; returns its output."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.elastic.chaos", *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 runs with violations" in found.stdout
    return found.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("over_a_folder", [False, True])
def test_random_faults_break_no_rule(over_a_folder: bool, tmp_path: Path) -> None:
    over = ["--rendezvous", tmp_path.as_uri()] if over_a_folder else []
    assert "3 runs with seed 1" in run("--runs", "3", "--seed", "1", *over)


def test_a_run_over_a_folder_survives_random_faults(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    assert "faults: 1 join, 1 key, 1 kill, 1 model" in run("--only", "257", "--rendezvous", tmp_path.as_uri())


@pytest.mark.parametrize("bucket", [False, True])
def test_plans_follow_the_seed_and_spare_one_worker(bucket: bool) -> None:
    plans, again, others = ([plan_of(seed, n, bucket=bucket) for n in range(300)] for seed in (0, 0, 1))
    assert plans == again != others
    for plan in plans:
        hit = {fault.worker for fault in plan.faults if fault.kind in ("kill", "term", "long stop")}
        assert set(range(plan.size)) - hit
    kinds = {"kill", "term", "stop", "long stop", "join"} | ({"model", "key"} if bucket else set())
    assert {fault.kind for plan in plans for fault in plan.faults} == kinds
    assert {plan.share for plan in plans} == set(SHARES if bucket else [0.0])
    assert {plan.remote for plan in plans} == ({False, True} if bucket else {False})
