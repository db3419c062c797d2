# SPDX-License-Identifier: Apache-2.0
"""`thinwire train --tensor-parallel`: workers with blocks train as whole models do, are saved, and resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pool import run_processes
from tests.rules import refusals
from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire.lab.runs import RunFolder, resolve
from thinwire.lab.runs.settings import Settings, parse_mesh
from thinwire.lab.runs.tensor import check_tensor_parallel
from thinwire.lab.runs.worker import work
from thinwire.lab.tasks import load
from thinwire.methods.strategies.gradients.all_reduce import AllReduce

ASKED: dict[str, Any] = {
    "task": "text", "model": "0.5m", "steps": 6, "batch_size": 4, "lr": 0.05, "optimizer": "sgd",
    "eval_limit": 5, "eval_every": 4, "threads": 1, "strategy": "LocalSGD(period=2)",
}  # fmt: skip


def settings(workers: int, **more: Any) -> Settings:
    return resolve({**ASKED, "workers": workers, **more})


def trained(run: Settings, folder: str, *, resume: bool = False) -> None:
    if not resume:
        Path(folder).mkdir(exist_ok=True)
    RunFolder(Path(folder)).write_settings(run)
    work(run, Path(folder), resume=resume)


def several(folder: str) -> None:
    """Two copies in two rows each: uninterrupted, and saved after two steps and resumed."""
    run = settings(4, tensor_parallel="2x1")
    trained(run, f"{folder}/cut")
    half = replace(run, steps=2, save_every=2)
    trained(half, f"{folder}/half")
    trained(replace(half, steps=6), f"{folder}/half", resume=True)
    with_lamb = replace(run, optimizer="lamb", strategy="AllReduce()", tensor_parallel="2x2", steps=2)
    with pytest.raises(ConfigError, match="heads"):
        trained(replace(with_lamb, tensor_parallel="1x4"), f"{folder}/refused")
    trained(replace(with_lamb, model="1m"), f"{folder}/lamb")


def uncut_runs(folder: str) -> None:
    trained(settings(2), f"{folder}/whole")


def lines(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).lines("metrics.jsonl")


@pytest.mark.slow
def test_split_copies_train_like_whole_ones_and_resume_where_they_were_saved(tmp_path: Path) -> None:
    run_processes(4, several, str(tmp_path))
    run_processes(2, uncut_runs, str(tmp_path))
    cut, half, whole = (lines(tmp_path / name) for name in ("cut", "half", "whole"))
    losses = [[line["loss"] for line in found if "loss" in line] for found in (cut, half, whole)]
    assert losses[0] == losses[1]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[2]), rtol=2e-5, atol=2e-5)
    held_out = [[line["eval_loss"] for line in found if "eval_loss" in line] for found in (cut, half, whole)]
    assert held_out[0][-1] == held_out[1][-1]
    torch.testing.assert_close(torch.tensor(held_out[0]), torch.tensor(held_out[2]), rtol=2e-5, atol=2e-5)
    summary = json.loads((tmp_path / "cut" / "summary.json").read_text())
    assert (summary["tensor_parallel"], summary["copies"], summary["workers"]) == ("2x1", 2, 4)
    blocks = sorted(path.name for path in (tmp_path / "half" / "checkpoints").iterdir())
    assert blocks == ["mesh-2x1-row-0-column-0", "mesh-2x1-row-1-column-0"]
    spans = {line["rank"] for line in RunFolder(tmp_path / "cut").lines("timeline.jsonl")}
    assert spans == {0, 1, 2, 3}
    lamb = [line["loss"] for line in lines(tmp_path / "lamb") if "loss" in line]
    assert len(lamb) == 2
    assert lamb[1] < lamb[0] + 1


test_what_cannot_be_cut_is_refused_before_any_worker_is_started = refusals(
    [
        ({"tensor_parallel": "2x"}, "must be ROWSxCOLUMNS"),
        ({"tensor_parallel": "2x3"}, r"4 workers % 6 must be 0, because a 2x3 mesh has 6 ranks. Use 6 workers"),
        ({"tensor_parallel": "2x2"}, r"blocks.0.attention with heads=3: 3 % 2 must be 0"),
        ({"tensor_parallel": "4x1", "batch_size": 6}, "4 rows must share it evenly. Use 8"),
        ({"tensor_parallel": "4x1", "strategy": "ddp"}, "torch's own methods hold whole models"),
        ({"tensor_parallel": "4x1", "optimizer": "onebit-lamb"}, "Use onebit-adam or lamb"),
        ({"tensor_parallel": "4x1", "task": "digits", "model": None}, "only language models are cut"),
    ],
    lambda more: settings(4, **more),
)


def test_the_model_is_of_the_first_size_that_the_mesh_divides() -> None:
    chosen = {mesh: settings(4, tensor_parallel=mesh, model=None).model for mesh in ("2x2", "4x1", "1x4")}
    assert chosen == {"2x2": "1m", "4x1": "0.5m", "1x4": "1m"}
    assert settings(3, tensor_parallel="1x3", model=None).model == "0.5m"


def test_a_size_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(
        ConfigError, match=r"model='0.5m': blocks.0.attention with heads=3: .*. Use --model-size 1m or 6m"
    ):
        settings(4, tensor_parallel="2x2")


def test_a_shape_is_read_and_a_recipe_is_for_the_copies() -> None:
    assert parse_mesh(None, 3) == (1, 1)
    assert parse_mesh(" 2x3 ", 12) == (2, 3)
    run = settings(8, model="1m", tensor_parallel="2x2")
    assert (run.mesh_shape, run.copies) == ((2, 2), 2)
    assert Settings.from_json(run.to_json()) == run


@pytest.mark.slow
def test_the_command_trains_a_model_that_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "train --task text --model-size 1m --workers 4 --tensor-parallel 2x2 --steps 3 --batch-size 4 --threads 1"
    folder = tmp_path / "run"
    assert main([*words.split(), "--eval-limit", "4", "--save-every", "2", "--out", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert main(["train", "--resume", str(folder), "--steps", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["steps"], summary["tensor_parallel"]) == (4, "2x2")
    assert main(["train", "--resume", str(folder), "--steps", "5", "--tensor-parallel", "4x1"]) == 2
    assert "the run to resume has '2x2', which cannot change" in capsys.readouterr().err


def test_chosen_examples_and_blocks_cannot_be_combined() -> None:
    run = replace(settings(4, tensor_parallel="4x1"), coreset="Craig(fraction=0.5)")
    with pytest.raises(ConfigError, match="choosing asks whole models"):
        check_tensor_parallel(run, load("text"), AllReduce())
