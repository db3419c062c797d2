# SPDX-License-Identifier: Apache-2.0
"""Arrays are as large as fits into memory; what cannot be fused or trained is refused by name before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.rules import refusals
from thinwire.arrays.fusion import autotune
from thinwire.arrays.sweep import sweeping
from thinwire.arrays.sweep.plan import Plan, Setting
from thinwire.arrays.sweep.sampling import RandomSampler
from thinwire.arrays.sweep.space import Range, Space, parse_domain
from thinwire.arrays.sweep.sweeping import Progress, capacity_for, sweep
from thinwire.arrays.sweep.training import TrialArray
from thinwire.arrays.sweep.trials import FUSIBLE, Trial, partition
from thinwire.cli import main
from thinwire.errors import ConfigError
from thinwire.planning.plan.peak_memory import PeakMemory

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
TRIALS = [Trial(number, {"lr": 0.01}) for number in range(12)]


@pytest.fixture(autouse=True)
def no_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


@pytest.fixture(scope="module")
def plan() -> Plan:
    from thinwire.lab.tasks import load

    return Plan(load("digits"), steps=3, eval_limit=64)


def peak_of(plan: Plan, count: int) -> int:
    """The bytes of tensors of an array of so many trials."""
    with PeakMemory() as memory:
        run = TrialArray(plan, TRIALS[:count])
        for _ in range(2):
            run.advance()
    return memory.peak


@pytest.mark.parametrize("members", [2, 5, 11])
def test_an_array_is_the_largest_whose_tensors_take_two_fifths_of_free_memory(
    members: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = int(peak_of(plan, members) / 0.4)
    monkeypatch.setattr(sweeping, "free_bytes", lambda: int(1.01 * room))
    assert capacity_for(plan, TRIALS) == members
    monkeypatch.setattr(sweeping, "free_bytes", lambda: int(0.99 * room))
    assert capacity_for(plan, TRIALS) == members - 1
    assert capacity_for(plan, TRIALS[:1]) == 1


def test_a_sweep_trains_no_larger_array_than_fits(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "free_bytes", lambda: int(1.01 * peak_of(plan, 3) / 0.4))
    events: list[Progress] = []
    found = sweep(plan, RandomSampler(Space({"lr": Range(1e-3, 1e-1)})), 10, callback=events.append)
    assert len(found) == 10 and max(each.members for each in events) == 3


def test_no_trial_that_fits_is_an_error(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "free_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="not one trial fits into 400 bytes"):
        capacity_for(plan, TRIALS)


def test_unknown_free_memory_is_an_error_that_names_together(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sweeping, "_MEMINFO", tmp_path / "nothing")
    with pytest.raises(ConfigError, match="by `together`"):
        capacity_for(plan, TRIALS)


def test_a_space_is_partitioned_by_what_cannot_be_fused(plan: Plan) -> None:
    text = {"lr": "log:1e-3:1e-1", "momentum": "0:0.9", "batch_size": "8,16", "optimizer": "sgd,adamw", "eps": "0:1e-3"}
    space = Space({name: parse_domain(domain) for name, domain in text.items()})
    drawn = RandomSampler(space, seed=3).ask(40)
    groups = partition(drawn, FUSIBLE)
    kinds = [
        {(each.hyperparameters["batch_size"], each.hyperparameters["optimizer"]) for each in group} for group in groups
    ]
    assert len(groups) == 4 and all(len(kind) == 1 for kind in kinds)
    assert sorted(each.number for group in groups for each in group) == list(range(40))
    for group in groups:
        assert TrialArray(plan, group[:2]).batch_size == group[0].hyperparameters["batch_size"]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_hyperparameter_that_is_unknown_or_out_of_its_range_is_refused_by_name(plan: Plan) -> None:
    cases: list[Any] = [
        ({"dropout": 0.1}, "must be one of alpha, batch_size"),
        ({"lr": "fast"}, "must be a number"),
        ({"optimizer": "lion"}, "lion"),
        ({"lr": -0.1}, "lr=-0.1: must be finite and not negative"),
        ({"eps": float("inf")}, "eps=inf"),
        ({"beta1": 1.0}, r"beta1=1.0: must lie in \[0, 1\)"),
        ({"batch_size": 0}, "batch_size=0: must be at least 1"),
        ({"batch_size": 16.5}, "batch_size=16.5: must be a whole number"),
        ({"batch_size": float("nan")}, "batch_size=nan: must be a whole number"),
        ({"model_size": "huge"}, "model_size='huge': digits has"),
    ]
    refusals(cases, plan.setting)()


def test_a_setting_holds_only_what_can_be_trained() -> None:
    fine: dict[str, Any] = {
        "momentum": 0.9,
        "weight_decay": 0.0,
        "optimizer": "sgd",
        "batch_size": 8,
        "model_size": "s",
    }
    assert Setting(lr=0.1, **fine).beta2 == 0.999
    with pytest.raises(ConfigError, match="weight_decay=-1"):
        Setting(lr=0.1, **{**fine, "weight_decay": -1})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr fast", "--lr fast: must be a number"),
        ("--optimizer adamw --beta1 0.5:1.5", "beta1=1.5: must lie in [0, 1)"),
        ("--momentum 0:-1", "--momentum range linear:0:-1: its ends must be finite and rise"),
        ("--model-size small,huge", "model_size="),
        ("--optimizer sgd,lion", "optimizer='lion': must be one of sgd, adam, adamw, lamb"),
        ("--batch-size 0,8", "batch_size=0"),
        ("--trials 0", "--trials 0: must be at least 1"),
        ("--together 0", "--together 0: must be at least 1"),
        ("--halving 0", "first=0: must be at least 1"),
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--steps 40 --halving 40", "--halving 40: no rung within 40 steps"),
        ("--seed -1", "--seed -1: must lie in 0..4294967295"),
        ("--eval-limit 0", "--eval-limit 0: must be at least 1"),
        ("--threads 0", "--threads 0: must lie in 1..4096"),
        ("--batch-size 8:64", "batch_size=linear:8:64: examples are whole"),
        ("--beta1 0.5:0.9", "sgd has no such hyperparameter. Leave it out, or use adam or adamw"),
        (
            "--optimizer adamw --momentum 0.9",
            "--momentum 0.9: adamw has no such hyperparameter. Leave it out, or use sgd",
        ),
        ("--task nothing", "nothing"),
    ],
)
def test_the_command_refuses_before_anything_is_trained_and_leaves_nothing(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialArray, "advance", None)
    folder = tmp_path / "sweep"
    assert main(["sweep", "--out", str(folder), *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not folder.exists()


class DataDependent(nn.Module):
    """A model whose control flow depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x.flatten(1))
        return found if found.sum() > 0 else -found


def test_a_model_that_cannot_run_as_an_array_is_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinwire.lab.tasks.base import Task

    monkeypatch.setattr(Task, "model", lambda task, size=None, *, seed=0: DataDependent())
    assert main(["sweep", "--trials", "2", "--steps", "2", "--together", "2", "--out", str(tmp_path)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "the model's own forward" in message and "depends on a tensor's values" in message and "loop=True" in message
