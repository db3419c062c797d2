# SPDX-License-Identifier: Apache-2.0
"""Ray Tune trains packs of members, each pack in one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.arrays.sweep.ray_runs import KIND, TIMEOUT_SECONDS
from tests.rules import for_each
from thinwire.arrays.fusion import autotune
from thinwire.arrays.sweep import ray_tune
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.ray_tune import members_of, summary
from thinwire.arrays.sweep.space import Range, Space, parse_domain
from thinwire.arrays.sweep.training import train_alone, train_together
from thinwire.arrays.sweep.trials import Halving, Outcome, Trial
from thinwire.errors import ConfigError

pytest.importorskip("sklearn")
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
SPACE = Space({"lr": Range(1e-3, 1e-1, "log"), "momentum": Range(0, 0.9), "batch_size": parse_domain("8,16")})


@cache
def PLAN() -> Plan:
    from thinwire.lab.tasks import load

    return Plan(load("digits"), steps=6, eval_limit=64, halving=Halving(first=3, keep=3))


# Adapters with dropout: a pack resumes bit for bit only with the state of every member's generator.
ADAPTERS = Space(
    {
        "lr": Range(1e-3, 1e-2, "log"),
        "rank": parse_domain("2,4,8"),
        "lora_alpha": Range(4, 16),
        "lora_dropout": parse_domain("0.1"),
        "adapter_seed": parse_domain("whole:0:5"),
        "optimizer": parse_domain("adamw,sgd"),
    }
)


@cache
def ADAPTING() -> Plan:
    from tests.arrays.sweep.test_adapters import plan_of

    return plan_of(steps=6)


def fails_once(train: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """A trainable whose process fails after its second report, once."""

    def run(config: Any) -> None:
        from ray import tune

        mark, reported = folder.with_suffix(".failed"), []
        report: Any = tune.report

        def report_and_fail(*args: Any, **kwargs: Any) -> None:
            report(*args, **kwargs)
            reported.append(args)
            if len(reported) == 2 and not mark.exists():
                mark.write_text("")
                raise RuntimeError("as if the machine had failed")

        tune.report = report_and_fail
        try:
            train(config)
        finally:
            tune.report = report

    return run


def runs_of(kind: str) -> Any:
    """The results of Ray's runs of "models" or "adapters"."""
    pytest.importorskip("optuna")
    before = set(Path("/tmp").glob("ray*"))
    found = guarded([], kind=kind)
    assert found.returncode == 0, found.stderr[-3000:]
    assert set(Path("/tmp").glob("ray*")) <= before
    return json.loads(found.stdout.splitlines()[-1])


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(310)
def test_packs_train_under_tune_as_their_members_do_alone_and_resume_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = runs_of("models")
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")
    for kind in ("drawn", "searched"):
        assert len(runs[kind]) == 1 + (kind == "searched")
        for config, metrics, error in runs[kind]:
            assert error == "None"
            _compare(config, metrics, PLAN(), "batch_size")
            trial = members_of(config)[metrics["best"]]
            assert metrics["loss"] == pytest.approx(train_alone(PLAN(), trial).loss, abs=1e-5)
    _compare_study(runs)


@needs_ray
@pytest.mark.slow
@pytest.mark.timeout(310)
def test_adapters_train_in_packs_under_tune_and_the_best_is_in_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", reason="needs peft")
    runs = runs_of("adapters")
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")
    for config, metrics, error in runs["searched"]:
        assert error == "None"
        _compare(config, metrics, ADAPTING(), "optimizer")
    _compare_study(runs)
    reported, loaded = runs["best"]
    assert loaded == pytest.approx(reported, abs=1e-6)
    assert reported == min(metrics["loss"] for _, metrics, _ in runs["searched"])


def _compare_study(runs: Any) -> None:
    """A pack was trained again after a failure, and the searcher learned every member's loss."""
    assert sum(metrics["training_iteration"] for _, metrics, _ in runs["searched"]) > 2
    judged = [row["loss"] for _, metrics, _ in runs["searched"] for row in metrics["members"]]
    assert runs["study"] == [["COMPLETE", loss] for loss in judged] and len(judged) == 6


def guarded(
    command: list[str], then: Callable[[subprocess.Popen[str]], None] = lambda guard: None, kind: str = "models"
) -> Any:
    """Run a command under guard; whatever ends this leaves the guard the time to end all that was started."""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.arrays.sweep.ray_runs", *command],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", KIND: kind},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as guard:
        try:
            then(guard)
            out, err = guard.communicate(timeout=TIMEOUT_SECONDS + 10)
        except BaseException:
            guard.terminate()
            guard.communicate(timeout=20)
            raise
    return subprocess.CompletedProcess(guard.args, guard.returncode, out, err)


# A child in its own session that ignores SIGTERM, whose parent has ended, and which writes to the guard's folder.
STUBBORN = """
import os, signal, sys, time
home = os.environ["THINWIRE_RAY_HOME"]
if os.fork():
    while {waits} or not os.listdir(home): time.sleep(0.01)
    os._exit(0)
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), home, flush=True)
open(os.path.join(home, "begun"), "w").close()
time.sleep(60)
"""


def started_by(guard: subprocess.Popen[str]) -> tuple[int, Path]:
    """The stubborn child's process id, and its folder."""
    assert guard.stdout is not None
    process, home = guard.stdout.readline().split()
    return int(process), Path(home)


def gone(process: int, home: Path, seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while Path("/proc", str(process)).exists() or home.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("how", ["its command ends", "it is terminated"])
def test_nothing_outlives_the_guard(how: str) -> None:
    seen: list[tuple[int, Path]] = []

    def then(guard: subprocess.Popen[str]) -> None:
        seen.append(started_by(guard))
        if how == "it is terminated":
            guard.terminate()

    alone = how == "its command ends"
    found = guarded([sys.executable, "-c", STUBBORN.format(waits=not alone)], then)
    assert found.returncode == (0 if alone else 1)
    assert gone(*seen[0], seconds=0)


def test_nothing_outlives_a_test_that_was_killed() -> None:
    command = [sys.executable, "-c", STUBBORN.format(waits=True)]
    test = f"import subprocess; subprocess.run({[sys.executable, '-m', 'tests.arrays.sweep.ray_runs', *command]!r})"
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", test], cwd=root, stdout=subprocess.PIPE, text=True) as killed:
        process, home = started_by(killed)
        killed.kill()
    assert gone(process, home)


def test_what_a_killed_guard_has_left_is_ended_by_the_next_one() -> None:
    command = [sys.executable, "-m", "tests.arrays.sweep.ray_runs", sys.executable, "-c", STUBBORN.format(waits=True)]
    root = Path(__file__).parents[3]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as killed:
        process, home = started_by(killed)
        killed.kill()
    assert Path("/proc", str(process)).exists() and home.exists()
    assert guarded([sys.executable, "-c", "pass"]).returncode == 0
    assert gone(process, home)


def _compare(config: Any, metrics: Any, plan: Plan, by: str) -> None:
    """The report of a pack to Tune has the outcomes that its members have here, in arrays of one value of `by`."""
    trials = members_of(config)
    groups: dict[Any, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.hyperparameters[by], []).append(trial)
    expected = [outcome for group in groups.values() for outcome in train_together(plan, group)]
    assert metrics["members"] == summary(expected, 0)["members"]
    assert metrics["steps"] == len(groups) * plan.steps
    best = metrics["members"][metrics["best"]]
    assert best["loss"] == metrics["loss"] and not best["stopped"]


@needs_ray
def test_spaces_become_those_of_tune() -> None:
    from ray import tune

    space = Space({name: parse_domain(text) for name, text in DOMAINS.items()})
    found = ray_tune.pack_of(space, 2)["members"]
    assert len(found) == 2
    kinds = {name: type(domain) for name, domain in found[0].items()}
    assert kinds == {
        "lr": tune.search.sample.Float,
        "momentum": tune.search.sample.Float,
        "batch_size": tune.search.sample.Integer,
        "optimizer": tune.search.sample.Categorical,
    }
    whole = found[0]["batch_size"]
    assert (whole.lower, whole.upper) == (8, 17)


DOMAINS = {"lr": "log:1e-3:1e-1", "momentum": "0:0.9", "batch_size": "whole:8:16", "optimizer": "sgd,adamw"}


class Listed:
    """A searcher that proposes a given list, and records the results it gets."""

    def __init__(self, proposals: list[Any]) -> None:
        self.proposals, self.results, self.has_space = proposals, list[Any](), False

    def suggest(self, trial_id: str) -> Any:
        return self.proposals.pop(0) if self.proposals else "FINISHED"

    def set_search_properties(self, metric: str, mode: str, config: Any, **spec: Any) -> bool:
        assert (metric, mode) == ("loss", "min") and config["lr"].upper == 0.1
        return not self.has_space

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        self.results.append((trial_id, result and result["loss"], error))


@needs_ray
def test_a_packed_searcher_proposes_and_reports_every_member() -> None:
    inner = Listed([{"lr": 1}, None, {"lr": 2}, {"lr": 3}, {"lr": 4}])
    search = ray_tune.packed(inner, SPACE, 2)
    assert search.suggest("a") is None
    assert search.suggest("a") == {"members": [{"lr": 1}, {"lr": 2}]}
    assert search.suggest("b") == {"members": [{"lr": 3}, {"lr": 4}]}
    assert search.suggest("c") == "FINISHED"
    rows = [{"trial": 0, "loss": 0.5, "steps": 6}, {"trial": 1, "loss": math.nan, "steps": 6}]
    search.on_trial_complete("a", {"members": rows})
    search.on_trial_complete("b", error=True)
    assert inner.results == [("a-0", 0.5, False), ("a-1", None, True), ("b-0", None, True), ("b-1", None, True)]
    inner.proposals = [{"lr": 5}]
    assert search.suggest("d") == {"members": [{"lr": 5}]}
    assert search.set_search_properties("loss", "min", {})
    with pytest.raises(ConfigError, match="Leave one out"):
        search.set_search_properties("loss", "min", {"lr": 1})
    again = ray_tune.packed(inner, SPACE, 2)
    again.set_state(search.get_state())
    assert list(again.pending) == ["c", "d"]
    inner.has_space = True
    with pytest.raises(ConfigError, match="Listed has a space of its own"):
        ray_tune.packed(inner, SPACE, 2)
    for words, wrong in (("at least 1 member", {"together": 0}), ("must be loss or metric", {"metric": "accuracy"})):
        with pytest.raises(ConfigError, match=words):
            ray_tune.packed(inner, SPACE, **{"together": 2, **wrong})


def test_a_pack_reports_its_best_member() -> None:
    trials = [Trial(place, {"lr": 0.1}) for place in range(3)]
    outcomes = [
        Outcome(trials[2], 0.3, 0.9, 6),
        Outcome(trials[0], math.nan, 0, 6),
        Outcome(trials[1], 0.1, 1, 3, True),
    ]
    found = summary(outcomes, 6)
    assert (found["loss"], found["best"], found["steps"]) == (0.3, 2, 6)
    assert [row["trial"] for row in found["members"]] == [0, 1, 2]
    assert summary(outcomes[1:2], 6)["loss"] == math.inf


@for_each([{}, {"lr": 0.1}, {"members": []}, {"members": [0.1]}])
def test_a_configuration_that_is_not_a_pack_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="a pack is"):
        members_of(config)


@needs_ray
def test_adapters_under_ray_are_saved_in_checkpoints_only() -> None:
    pytest.importorskip("peft", reason="needs peft")
    from thinwire.arrays.sweep.adapting import Adapting

    with pytest.raises(ConfigError, match=r"folder='out'.*in the checkpoints.*Leave folder out"):
        ray_tune.trainable(replace(PLAN(), adapting=Adapting(folder=Path("out"))))


def test_without_ray_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    for call in (
        lambda: ray_tune.trainable(PLAN()),
        lambda: ray_tune.pack_of(SPACE, 2),
        lambda: ray_tune.packed(None, SPACE, 2),
    ):
        with pytest.raises(ConfigError, match=r"thinwire\[ray\]"):
            call()
