"""Backup workers in loops that count on every step, and in runs with a worker that is stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import attach
from thinwire import BackupWorkers, Comm, ConfigError, run_threads
from thinwire.runs.defaults import resolve
from thinwire.runs.launcher import launch


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"find_unused": True}, "find_unused=True: a late worker leaves out steps"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler: a late worker leaves out steps"),
    ],
)
def test_loops_that_count_on_every_step_are_refused(settings: dict[str, Any], words: str) -> None:
    def body(comm: Comm) -> None:
        attach(comm, BackupWorkers(0), **settings).detach()
        attach(comm, BackupWorkers(), **settings)

    with pytest.raises(ConfigError, match=words):
        run_threads(2, body, timeout=10)


@pytest.mark.slow
def test_a_run_with_a_stopped_worker_is_whole(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    settings = resolve(
        {
            "task": "digits",
            "strategy": "BackupWorkers()",
            "workers": 3,
            "steps": 60,
            "slow": "1:5x",
            "stall": "1:10ms",
            "stop": "2:100ms:400ms",
            "eval_every": 30,
        }
    )
    summary = launch(settings, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "step_seconds" in row] == list(range(1, 61))
    assert sum(row["metrics"]["steps_missed"] for row in rows if "metrics" in row) > 5
    assert summary["eval_loss"] < 2.5
    spans = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    assert {"quorum", "mean", "compute"} <= {span["name"] for span in spans}
