# SPDX-License-Identifier: Apache-2.0
"""Sweeps over adapters of a model of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("transformers", reason="needs transformers")

import peft
import torch
from torch import Tensor, nn

from tests.arrays.finetuning.separate import QUIET, model_of, next_token
from tests.rules import refusals
from thinwire import ConfigError
from thinwire.arrays.sweep import sweeping
from thinwire.arrays.sweep.adapting import Adapting
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import RandomSampler
from thinwire.arrays.sweep.space import Space, parse_domain
from thinwire.arrays.sweep.sweeping import array_size_for, sweep
from thinwire.arrays.sweep.training import train_alone
from thinwire.arrays.sweep.trials import Halving, Trial, ranked
from thinwire.lab.tasks.own import OwnFunctions, own_task

pytestmark = QUIET


def model() -> nn.Module:
    return model_of("llama")


def data(rank: int, size: int, seed: int) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    ids = torch.randint(3, 60, (12, 2, 8), generator=torch.Generator().manual_seed(seed))
    batches = [(each, each) for each in ids]
    return batches[:8], batches[8:]


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return next_token(outputs.logits, targets)


def plan_of(folder: Path | None = None, steps: int = 4) -> Plan:
    task = own_task(OwnFunctions(model, data, loss), size=1)
    return Plan(task, steps, adapting=Adapting(("q_proj", "v_proj"), folder))


def sampler(**domains: str) -> RandomSampler:
    given = {"lr": "log:1e-3:1e-2", "optimizer": "adamw", **domains}
    return RandomSampler(Space({name: parse_domain(text) for name, text in given.items()}), seed=0)


@pytest.mark.slow
def test_trials_of_an_array_equal_trials_alone_and_are_saved(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    found = sweep(plan, sampler(rank="2,4,8", lora_alpha="4:16", adapter_seed="whole:0:5"), 5, together=3)
    for outcome in found:
        alone = train_alone(plan, outcome.trial)
        assert abs(outcome.loss - alone.loss) < 1e-9
        loaded: Any = peft.PeftModel.from_pretrained(model(), tmp_path / f"trial-{outcome.trial.number}").eval()
        assert loaded.peft_config["default"].r == outcome.trial.hyperparameters["rank"]
        with torch.no_grad():
            losses = [float(loss(loaded(ids), ids)) for ids, _ in data(0, 1, 0)[1]]
        assert abs(sum(losses) / len(losses) - outcome.loss) < 1e-6


def test_stopped_trials_leave_the_array_and_are_not_saved(tmp_path: Path) -> None:
    plan = replace(plan_of(tmp_path, steps=6), halving=Halving(2, 3))
    found = sweep(plan, sampler(rank="2,4,8"), 4, together=4)
    left = {f"trial-{each.trial.number}" for each in found if not each.stopped}
    assert len(left) == 2 and {each.name for each in tmp_path.iterdir()} == left
    assert ranked(found)[0].trial.number in {each.trial.number for each in found if not each.stopped}


def test_adapters_train_apart_where_an_array_is_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [Trial(number, {"lr": 1e-3, "rank": 2.0}) for number in range(3)]
    monkeypatch.setattr(sweeping, "capacity_for", lambda plan, trials: len(trials))
    seconds = {3: 1.0, 1: 1.0}
    monkeypatch.setattr(sweeping, "_step_seconds", lambda run: seconds[len(run.trials)])
    assert array_size_for(plan_of(), trials) == 3
    seconds[3] = 3.2
    assert array_size_for(plan_of(), trials) == 1


test_impossible_adapters_are_refused_before_training = refusals(
    [
        ({"rank": "2:4"}, r"rank=.*whole numbers"),
        ({"rank": "0,4"}, r"rank=0.*at least 1"),
        ({"lora_dropout": "0.5,1"}, r"lora_dropout=1"),
        ({"lora_alpha": "0,4"}, r"lora_alpha=0"),
    ],
    lambda domains: plan_of().check(Space({name: parse_domain(text) for name, text in domains.items()})),
)


def test_adapters_need_a_sweep_over_adapters_and_known_layers() -> None:
    space = Space({"rank": parse_domain("2,4")})
    with pytest.raises(ConfigError, match="belongs to a sweep over adapters"):
        replace(plan_of(), adapting=None).check(space)
    with pytest.raises(ConfigError, match=r"--targets nothing: .*Name layers of the model"):
        sweep(replace(plan_of(), adapting=Adapting(("nothing",))), sampler(), 2, together=2)


@pytest.mark.slow
def test_the_command_exports_the_best_adapter(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="needs optuna")
    from thinwire.cli.sweep import Sweep

    here = "tests.arrays.sweep.test_adapters"
    options = {"own_model": f"{here}:model", "data": Path(f"{here}:data"), "own_loss": f"{here}:loss"}
    command = Sweep(
        **options,  # pyright: ignore[reportArgumentType]
        adapters=True,
        targets="q_proj, v_proj",
        rank="2,4",
        lora_alpha="4:16",
        adapter_seed="0,1",
        lr="log:1e-3:1e-2",
        trials=4,
        steps=3,
        sampler="optuna",
        check=True,
        out=tmp_path / "out",
        json=True,
    )
    assert command() == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    best = tmp_path / "out" / summary["best_adapter"]
    assert summary["largest_difference"] < 1e-9
    assert isinstance(peft.PeftModel.from_pretrained(model(), best), peft.PeftModel)
