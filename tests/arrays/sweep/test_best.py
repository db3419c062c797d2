# SPDX-License-Identifier: Apache-2.0
"""A sweep ends with the best trial as options of `thinwire train`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from thinwire.cli import main

pytest.importorskip("sklearn")
pytestmark = pytest.mark.usefixtures("fresh_autotune_cache")
SHORT = ["--task", "digits", "--trials", "2", "--steps", "12", "--eval-limit", "64"]


def test_the_printed_command_trains_the_best_trial_to_the_same_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--lr", "0.02,0.05", "--batch-size", "8", "--out", str(tmp_path / "sweep")]
    assert main(["sweep", *SHORT, *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best_command"] == f"thinwire train --config {tmp_path}/sweep/best.toml"
    assert main([*shlex.split(found["best_command"])[1:], "--out", str(tmp_path / "best"), "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["eval_loss"] == pytest.approx(found["best_loss"], rel=1e-5) and trained["workers"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--optimizer", "adam"], "has no optimizer adam"),
        (["--optimizer", "adamw", "--beta1", "0.8"], "has no --beta1"),
    ],
)
def test_a_best_trial_that_train_cannot_train_is_named(
    options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *SHORT, "--lr", "0.01", *options, "--out", str(tmp_path / "sweep")]) == 0
    assert f"no best.toml: thinwire train {reason}" in capsys.readouterr().out
    assert not (tmp_path / "sweep" / "best.toml").exists()
