# SPDX-License-Identifier: Apache-2.0
"""Trials trained as one array are the trials trained one after another."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from thinwire import ConfigError
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import OptunaSampler, RandomSampler, sampler_of
from thinwire.arrays.sweep.space import Range, Space, parse_domain
from thinwire.arrays.sweep.sweeping import Progress, capacity_for, sweep
from thinwire.arrays.sweep.training import TrialArray, train_alone, train_together
from thinwire.arrays.sweep.trials import Halving, Outcome, Trial
from thinwire.cli import main

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")


pytestmark = pytest.mark.usefixtures("fresh_autotune_cache")


@pytest.fixture(scope="module")
def plan() -> Plan:
    from thinwire.lab.tasks import load

    return Plan(load("digits"), steps=12, eval_limit=128)


def trials(count: int, **more: str) -> list[Trial]:
    space = Space({"lr": Range(1e-3, 1e-1, "log")} | {name: parse_domain(text) for name, text in more.items()})
    return [Trial(number, space.draw(0, number)) for number in range(count)]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_an_array_of_trials_ends_as_they_do_one_by_one(plan: Plan, optimizer: str, schedule: str) -> None:
    hyperparameter = {"momentum": "0:0.9"} if optimizer == "sgd" else {"beta1": "0.5:0.95", "eps": "log:1e-8:1e-3"}
    drawn = trials(3, optimizer=optimizer, weight_decay="0:0.1", **hyperparameter)
    own = Plan(plan.task, plan.steps, schedule=schedule, eval_limit=plan.eval_limit)  # type: ignore[arg-type]
    for together, trial in zip(train_together(own, drawn), drawn, strict=True):
        alone = train_alone(own, trial)
        assert together.trial == trial
        assert together.loss == pytest.approx(alone.loss, abs=1e-5)
        assert together.metric == pytest.approx(alone.metric, abs=0.01)
        assert together.steps == alone.steps == 12


def test_halving_stops_the_worst_and_leaves_the_others_unchanged(plan: Plan) -> None:
    drawn = trials(6)
    halved = Plan(plan.task, plan.steps, halving=Halving(first=3, keep=2), eval_limit=plan.eval_limit)
    found = train_together(halved, drawn)
    assert [each.steps for each in sorted(found, key=lambda each: each.steps)] == [3, 3, 3, 6, 12, 12]
    assert [each.stopped for each in found] == [each.steps < 12 for each in found]
    for survivor in (each for each in found if not each.stopped):
        assert survivor.loss == pytest.approx(train_alone(plan, survivor.trial).loss, abs=1e-5)


def test_a_trial_that_diverges_does_not_change_the_others(plan: Plan) -> None:
    sound = trials(2)
    wild = Trial(2, {"lr": 1e30})
    found = train_together(plan, [*sound, wild])
    assert not math.isfinite(found[2].loss)
    assert [each.loss for each in found[:2]] == pytest.approx(
        [each.loss for each in train_together(plan, sound)], abs=1e-6
    )


def test_a_sweep_trains_what_cannot_be_fused_apart(plan: Plan) -> None:
    events: list[Progress] = []
    space = Space({"lr": Range(1e-3, 1e-1, "log"), "batch_size": parse_domain("8,16")})
    found = sweep(plan, RandomSampler(space, seed=1), 6, together=2, callback=events.append)
    assert [each.trial.number for each in found] == list(range(6))
    assert max(each.members for each in events) <= 2
    sizes = [each.trial.hyperparameters["batch_size"] for each in found]
    assert set(sizes) == {8, 16}
    assert found[0].loss == pytest.approx(train_alone(plan, found[0].trial).loss, abs=1e-5)


def test_small_trials_all_fit_and_a_sweep_finds_its_capacity(plan: Plan) -> None:
    assert capacity_for(plan, trials(3)) == 3
    assert len(sweep(plan, RandomSampler(Space({"lr": Range(1e-3, 1e-1)})), 3)) == 3


def test_a_study_proposes_arrays_and_learns_their_outcomes(plan: Plan) -> None:
    pytest.importorskip("optuna")
    sampler = OptunaSampler(Space({"lr": Range(1e-3, 1e-1, "log"), "batch_size": parse_domain("8,16")}), seed=0)
    found = sweep(plan, sampler, 4, together=2)
    values = {each.number: each.value for each in sampler.study.trials}
    assert values == {each.trial.number: each.loss for each in found}
    assert sampler.study.best_trial.number == min(found, key=lambda each: each.loss).trial.number


def test_a_study_learns_of_trials_that_diverged_or_were_stopped() -> None:
    pytest.importorskip("optuna")
    sampler = OptunaSampler(Space({"lr": Range(1e-3, 1e-1, "log")}), seed=0)
    first, second, third = sampler.ask(3)
    sampler.tell([Outcome(first, math.nan, 0, 5), Outcome(second, 0.5, 0, 5, stopped=True), Outcome(third, 0.4, 0, 9)])
    assert [each.state.name for each in sampler.study.trials] == ["FAIL", "PRUNED", "COMPLETE"]


def test_a_sampler_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of random, optuna"):
        sampler_of("grid", Space({}), seed=0)


def test_trials_that_cannot_be_fused_are_refused_as_one_array(plan: Plan) -> None:
    with pytest.raises(ConfigError, match="Partition them"):
        TrialArray(plan, [Trial(0, {"batch_size": 8}), Trial(1, {"batch_size": 16})])


@pytest.mark.slow
def test_the_command_sweeps_and_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    command = "sweep --task digits --trials 4 --steps 8 --lr log:1e-3:1e-1 --momentum 0:0.9 --eval-limit 64 --threads 1"
    threads = torch.get_num_threads()
    try:
        assert main([*command.split(), "--halving", "3", "--keep", "2", "--check", "--json", "--out", str(folder)]) == 0
    finally:
        torch.set_num_threads(threads)
    found = json.loads(capsys.readouterr().out)
    assert found["trials"] == json.loads((folder / "trials.json").read_text())
    assert found["largest_difference"] < 1e-4
    assert found["stopped"] == 3
    assert (folder / "plots" / "sweep.png").stat().st_size > 5_000
    assert "Loss by hyperparameter" in (folder / "report.html").read_text()


def test_a_sweep_whose_trials_all_diverge_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    command = "sweep --task digits --trials 2 --steps 3 --lr 1e30 --eval-limit 64 --json"
    assert main([*command.split(), "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert found["diverged"] == 2 and found["best_loss"] is None
    assert json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)["best_loss"] is None


def test_an_impossible_range_is_refused_before_anything_is_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--lr", "log:0:1"]) != 0
    assert "begins above 0" in capsys.readouterr().err


class Ending:
    """A task whose models end in one layer more.

    Args:
        task: the task.
        layer: makes it.
    """

    def __init__(self, task: Any, layer: Callable[[], torch.nn.Module]) -> None:
        self._task = task
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def model(self, size: str, *, seed: int) -> torch.nn.Module:
        return torch.nn.Sequential(self._task.model(size, seed=seed), self._layer())


def test_trials_are_judged_without_a_change_to_layers_that_are_kept_in_evaluation_mode(plan: Plan) -> None:
    frozen: Any = Ending(plan.task, lambda: torch.nn.BatchNorm1d(10).eval())
    halving = Plan(frozen, plan.steps, halving=Halving(first=3, keep=2), eval_limit=plan.eval_limit)
    best = next(each for each in train_together(halving, trials(4)) if not each.stopped)
    alone = train_alone(Plan(frozen, plan.steps, eval_limit=plan.eval_limit), best.trial)
    assert best.loss == pytest.approx(alone.loss, abs=1e-5)


def test_trials_are_judged_in_evaluation_mode_and_go_on_training(plan: Plan) -> None:
    dropping: Any = Ending(plan.task, lambda: torch.nn.Dropout(0.9))
    judged = TrialArray(Plan(dropping, plan.steps, eval_limit=plan.eval_limit), trials(3))
    plain = TrialArray(plan, trials(3))
    assert [each.loss for each in judged.outcomes()] == [each.loss for each in plain.outcomes()]
    assert judged.array.training
    judged.advance()
    plain.advance()
    assert not torch.equal(judged.losses, plain.losses)  # dropout acts in training
