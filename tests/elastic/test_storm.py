# SPDX-License-Identifier: Apache-2.0
"""A short form of `benchmarks.storm`: real processes, through every kind of fault."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nat import weed
from benchmarks.storm import schedule

pytest.importorskip("obstore")
pytest.importorskip("cryptography")
pytest.importorskip("sklearn")

OPTIONS = "--workers 3 --longest 5 --task digits --period 8 --step-seconds 0.1"


def test_a_storm_is_a_schedule_in_which_joins_follow_kills() -> None:
    found = schedule(60, 900.0, 12, 0, longest=20.0)
    assert found == schedule(60, 900.0, 12, 0, longest=20.0)
    kinds = [fault.kind for fault in found]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("kill", "join", "stop", "cut"), 15)
    assert [kind for kind in kinds if kind in ("kill", "join")] == ["kill", "join"] * 15
    assert all(15 * number <= fault.at < 15 * (number + 1) for number, fault in enumerate(found))
    assert all(1.0 <= fault.seconds <= 20.0 and 0 <= fault.slot < 12 for fault in found)


def stormed(options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The undisturbed run and the other one."""
    command = [sys.executable, "-m", "benchmarks.storm", *OPTIONS.split(), *options.split()]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=300)
        except BaseException:
            process.terminate()
            raise
    assert process.returncode == 0, err[-3000:]
    calm, storm = map(json.loads, out.splitlines())
    return calm, storm


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_late_merging_trains_through_a_short_storm() -> None:
    calm, storm = stormed("--only late --faults 5 --seconds 60 --quorum 0.5")
    assert calm["contender"] == "undisturbed" and not calm["errors"] and not calm["hung"]
    assert storm["contender"] == "late" and not storm["errors"] and not storm["hung"], storm
    kinds = [fault.kind for fault in schedule(5, 60.0, 3, 0, longest=5.0)]
    assert storm["faults"] == Counter("stop" if kind == "cut" and weed() is None else kind for kind in kinds)
    assert storm["kept"] > 0 and calm["batches"] >= storm["batches"]
    assert math.isfinite(storm["loss"]) and math.isfinite(calm["loss"])


@pytest.mark.slow
@pytest.mark.timeout(310)
def test_runs_that_restart_lose_what_no_checkpoint_has() -> None:
    calm, storm = stormed("--only restart --faults 4 --seconds 40")
    assert calm["contender"] == "undisturbed" and storm["contender"] == "restart" and not storm["hung"], storm
    # Nothing is missing after a restart, so nothing joins.
    assert storm["faults"]["kill"] == 1 and "join" not in storm["faults"]
    assert 0 < storm["kept"] < 40 / 0.1 * 3 and math.isfinite(storm["loss"])
