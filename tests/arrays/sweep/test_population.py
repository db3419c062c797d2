# SPDX-License-Identifier: Apache-2.0
"""In a population the worst continue from the best, and a population that was killed is resumed bit for bit."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.grids import fast_where
from tests.rules import refusals
from thinwire.arrays.fusion import autotune
from thinwire.arrays.sweep.journal import Journal
from thinwire.arrays.sweep.plan import Plan
from thinwire.arrays.sweep.sampling import RandomSampler
from thinwire.arrays.sweep.space import Range, Space, parse_domain
from thinwire.arrays.sweep.sweeping import Progress, sweep
from thinwire.arrays.sweep.training import TrialArray, torch_optimizer, train_together
from thinwire.arrays.sweep.trials import Copy, Halving, Outcome, Population, Trial, ranked, rng_for
from thinwire.cli import main
from thinwire.core.storage import rank_file as part

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

# The server that `tests.pool` has torch loaded in, where it was started first.
context = multiprocessing.get_context("forkserver")
SPACE = Space({"lr": Range(1e-3, 1e-1, "log"), "momentum": Range(0, 0.9)})
POPULATION = Population(every=3, share=0.4, perturbed=("lr", "momentum"))


@pytest.fixture(autouse=True)
def no_kernel_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")


def planned(population: Population | None = POPULATION, **settings: Any) -> Plan:
    from thinwire.lab.tasks import load

    return Plan(
        load("digits"), **{"steps": 10, "eval_limit": 64, "schedule": "cosine", **settings}, population=population
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


def drawn(count: int, **hyperparameters: str | float) -> list[Trial]:
    return [
        Trial(each.number, {**each.hyperparameters, **hyperparameters})
        for each in RandomSampler(SPACE, seed=2).ask(count)
    ]


def outcomes(*losses: float) -> list[Outcome]:
    return [Outcome(Trial(number, {}), loss, 0, 3) for number, loss in enumerate(losses)]


def test_the_worst_of_a_population_continue_from_the_best() -> None:
    judged = outcomes(0.4, 0.1, math.nan, 0.3)
    assert Population(every=3).sources(judged, rng_for(0, 0, 3)) == [0, 1, 1, 3]
    found = Population(every=3, share=0.5).sources(judged, rng_for(0, 0, 3))
    assert found[1] == 1 and found[3] == 3 and {found[0], found[2]} <= {1, 3}


@pytest.mark.parametrize(("members", "replaced"), [(1, 0), (2, 1), (3, 1), (5, 1), (8, 2), (9, 2)])
def test_at_least_one_member_is_replaced_where_there_are_two(members: int, replaced: int) -> None:
    found = Population(every=1).sources(outcomes(*range(members)), rng_for(0, 0, 1))
    assert [place for place, source in enumerate(found) if source != place] == list(range(members))[
        members - replaced :
    ]
    assert all(source < max(1, replaced) for source in found[members - replaced :])


def test_hyperparameters_are_perturbed_up_and_down_and_stay_in_their_range() -> None:
    population, rng = Population(every=1, change=0.2), np.random.default_rng(0)
    assert {round(population.perturb("lr", 0.1, rng), 9) for _ in range(40)} == {0.08, 0.12}
    assert {round(population.perturb("momentum", 0.9, rng), 9) for _ in range(40)} == {0.88, 0.92}
    assert {round(population.perturb("beta1", 0.0, rng), 9) for _ in range(40)} == {0.0, 0.2}
    beta = 0.999
    for _ in range(200):
        beta = population.perturb("beta2", beta, rng)
        assert 0 <= beta < 1


def test_a_copy_has_the_state_and_hyperparameters_of_its_source_and_other_members_are_untouched() -> None:
    run = TrialArray(planned(None, schedule="constant"), drawn(4))
    for _ in range(3):
        run.advance()
    before = {name: tensor.detach().clone() for name, tensor in run.array.named_parameters()}
    rates, momenta, earlier = run.rates.clone(), run.optimizer.param_groups[0]["momentum"].clone(), list(run.trials)
    sources = run.exploit_and_explore(Population(every=3, share=0.25, change=0.5))
    (copy,) = (place for place, source in enumerate(sources) if source != place)
    for name, tensor in run.array.named_parameters():
        assert torch.equal(tensor, before[name][sources])
    for place, source in enumerate(sources):
        assert run.optimizer.param_groups[0]["momentum"][place] == momenta[source]
        assert run.trials[place].number == earlier[place].number
        if place != copy:
            assert run.rates[place] == rates[place] and run.trials[place] == earlier[place] and not run.copies[place]
    assert float(run.rates[copy] / rates[sources[copy]]) in (pytest.approx(0.5), pytest.approx(1.5))
    hyperparameters = {**earlier[sources[copy]].hyperparameters, "lr": float(run.rates[copy])}
    assert run.trials[copy].hyperparameters == hyperparameters
    assert run.copies[copy] == (Copy(3, earlier[sources[copy]].number, hyperparameters),)
    assert run.optimizer.extract(copy)["state"][0]["momentum_buffer"].equal(
        run.optimizer.extract(sources[copy])["state"][0]["momentum_buffer"]
    )


def one_by_one(
    plan: Plan, trials: list[Trial], population: Population
) -> list[tuple[float, dict[str, Any], list[Any]]]:
    """The same population as plain models with torch's own optimizers, copied by their state dicts."""
    task, batch_size = plan.task, plan.setting(trials[0].hyperparameters).batch_size
    (shard,) = task.shards(1, seed=plan.seed)
    models = [task.model(seed=plan.seed) for _ in trials]
    movers = [torch_optimizer(m, plan.setting(t.hyperparameters)) for m, t in zip(models, trials, strict=True)]
    hyperparameters, history = [dict(each.hyperparameters) for each in trials], [list[Any]() for _ in trials]

    def judged() -> list[float]:
        found = list[float]()
        for model in models:
            found.append(task.evaluate(model, limit=plan.eval_limit).loss)
        return found

    for step in range(1, plan.steps + 1):
        for model, mover, own in zip(models, movers, hyperparameters, strict=True):
            mover.zero_grad()
            task.loss(model, task.batch(shard, step - 1, batch_size=batch_size, seed=plan.seed, rank=0)).backward()
            mover.param_groups[0].update(lr=own["lr"] * plan.lr_factor(step - 1), momentum=own["momentum"])
            mover.step()
        if step % population.every or step == plan.steps:
            continue
        losses, rng = judged(), rng_for(plan.seed, trials[0].number, step)
        order = sorted(range(len(trials)), key=losses.__getitem__)
        count = max(1, int(population.share * len(trials)))
        copied = {worst: order[int(rng.integers(count))] for worst in order[-count:]}
        for place, source in sorted(copied.items()):
            models[place].load_state_dict(models[source].state_dict())
            movers[place].load_state_dict(deepcopy(movers[source].state_dict()))
            hyperparameters[place] = dict(hyperparameters[source])
            for name in population.perturbed:
                up = rng.random() < 0.5
                value = hyperparameters[place][name] if name == "lr" else 1 - hyperparameters[place][name]
                value *= 1 + population.change if up else 1 - population.change
                hyperparameters[place][name] = value if name == "lr" else max(0.0, 1 - value)
            history[place].append((step, trials[source].number))
    return list(zip(judged(), hyperparameters, history, strict=True))


def test_a_population_is_one_of_plain_models_that_are_copied_by_their_state_dicts(plan: Plan) -> None:
    trials = [Trial(each.number + 5, each.hyperparameters) for each in drawn(5)]
    found = train_together(plan, trials)
    assert sum(len(each.copies) for each in found) == 2 * 3
    for outcome, (loss, hyperparameters, history) in zip(found, one_by_one(plan, trials, POPULATION), strict=True):
        assert outcome.loss == pytest.approx(loss, abs=1e-5) and outcome.steps == plan.steps
        assert [(each.step, each.source) for each in outcome.copies] == history
        assert {name: outcome.trial.hyperparameters[name] for name in hyperparameters} == pytest.approx(
            hyperparameters, rel=1e-12
        )
        if outcome.copies:
            assert outcome.copies[-1].hyperparameters == outcome.trial.hyperparameters


def test_a_population_without_exchanges_is_the_same_trials_by_themselves(plan: Plan) -> None:
    never = planned(Population(every=plan.steps))
    assert train_together(never, drawn(3)) == train_together(planned(None), drawn(3))


def test_random_draws_differ_between_arrays_and_steps() -> None:
    first = [rng_for(*key).random() for key in ((0, 0, 3), (1, 0, 3), (0, 4, 3), (0, 0, 6), (0, 0, 3))]
    assert len(set(first)) == 4 and first[0] == first[-1]


# -- resuming ---------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """An interruption, as by a person."""


def interrupt_at(steps: int) -> Callable[[Progress], None]:
    seen: list[Progress] = []

    def record(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == steps:
            raise Interrupted

    return record


def run_sweep(
    plan: Plan, folder: Path | None, resume: bool = False, callback: Callable[[Progress], None] | None = None
) -> Any:
    journal = None if folder is None else Journal(folder, {"seed": 2}, resume=resume, every_seconds=0)
    return sweep(plan, RandomSampler(SPACE, seed=2), 7, together=4, callback=callback, journal=journal)


@pytest.mark.parametrize("steps", fast_where(lambda steps: steps in (4, 13), [1, 3, 4, 10, 13, 18]))
@pytest.mark.slow
def test_a_population_that_was_interrupted_has_the_same_trials_losses_and_lineage(
    steps: int, plan: Plan, tmp_path: Path
) -> None:
    whole = run_sweep(plan, None)
    for resume, stop in ((False, interrupt_at(steps)), (True, interrupt_at(2))):
        with pytest.raises(Interrupted):
            run_sweep(plan, tmp_path, resume, stop)
    assert run_sweep(plan, tmp_path, True) == whole
    assert {len(each.copies) for each in whole} > {0}
    assert run_sweep(plan, tmp_path, True) == whole  # from an ended one, too


def killed(folder: Path, moment: str, times: int, resume: bool) -> None:
    """A sweep that ends by SIGKILL at the n-th of such moments: no `finally` runs, and nothing is flushed."""
    os.environ[autotune.DETERMINISTIC] = "1"
    left = [times]

    def dying(real: Any) -> Any:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return call

    owner, name = {
        "copied, not yet perturbed": (TrialArray, "_perturb"),
        "tensors written, their names not": (part, "write_temporary"),
        "written aside, not in place": (part.RankFile, "commit"),
        "in place, the old not removed": (part.RankFile, "remove_stale"),
    }[moment]
    setattr(owner, name, dying(getattr(owner, name)))
    run_sweep(planned(), folder, resume)


KILLS = [
    ("copied, not yet perturbed", 2),
    ("tensors written, their names not", 4),
    ("written aside, not in place", 3),
    ("in place, the old not removed", 5),
]


def killed_again_and_again(folder: Path) -> None:
    """Each time in a process of its own, a fork of this one: all is loaded once, and nothing has computed yet."""
    torch.set_num_threads(1)
    planned()
    for place, (moment, times) in enumerate(KILLS):
        process = os.fork()
        if not process:
            killed(folder, moment, times, place > 0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        assert status == -signal.SIGKILL, (moment, status)


@pytest.mark.slow
def test_a_population_that_is_killed_again_and_again_ends_as_one_that_ran_through(plan: Plan, tmp_path: Path) -> None:
    process = context.Process(target=killed_again_and_again, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    process.close()
    assert len(list(tmp_path.iterdir())) >= 2
    assert run_sweep(plan, tmp_path, True) == run_sweep(plan, None)
    assert len(list(tmp_path.iterdir())) == 2


# -- the command -------------------------------------------------------------------------------------------------------

COMMAND = "sweep --task digits --trials 5 --steps 8 --momentum 0:0.9 --eval-limit 64 --together 5 --population 3 --json"


@pytest.mark.slow
def test_the_command_resumes_a_population(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMAND.split(), "--out", str(tmp_path / "whole")]) == 0
    whole = json.loads(capsys.readouterr().out)
    with monkeypatch.context() as patched:
        original: Any = TrialArray.exploit_and_explore
        usual: Any = Journal.__init__.__kwdefaults__
        patched.setattr(Journal.__init__, "__kwdefaults__", {**usual, "every_seconds": 0.0})

        def stop(run: TrialArray, population: Population) -> Any:
            if run.step == 6:
                raise Interrupted
            return original(run, population)

        patched.setattr(TrialArray, "exploit_and_explore", stop)
        with pytest.raises(Interrupted):
            main([*COMMAND.split(), "--out", str(tmp_path / "part")])
    assert main(["sweep", "--resume", str(tmp_path / "part"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["trials"] == whole["trials"]
    copies = [copy for trial in whole["trials"] for copy in trial["copies"]]
    assert [copy["step"] for copy in sorted(copies, key=lambda copy: copy["step"])] == [3, 6]
    assert all(set(copy["hyperparameters"]) == {"lr", "momentum"} for copy in copies)
    best = ranked([Outcome(Trial(t["trial"], t["hyperparameters"]), t["loss"], 0, t["steps"]) for t in whole["trials"]])
    assert [each.trial.number for each in best] == [trial["trial"] for trial in whole["trials"]]
    page = (tmp_path / "part" / "report.html").read_text()
    assert "copy of" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--population 0", "every=0: must be at least 1"),
        ("--population 3 --share 0.6", "--share 0.6: must lie in (0, 0.5]"),
        ("--population 3 --change 1", "--change 1.0: must lie in (0, 1)"),
        ("--population 3 --halving 2", "Use one of the two"),
        ("--population 3 --sampler optuna", "Use random"),
        ("--population 3 --check", "--check with --population: members copy each other. Leave it out"),
        ("--share 0.3", "--share 0.3: belongs to --population"),
        ("--population 300 --steps 300", "no selection"),
        ("--population 3 --together 1", "no other member to copy"),
    ],
)
def test_options_that_contradict_a_population_are_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--trials", "4", "--out", str(tmp_path / "sweep"), *words.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "sweep").exists()


test_impossible_settings_are_refused = refusals(
    [
        (lambda: Halving(first=0, keep=3), "first=0: must be at least 1"),
        (lambda: Halving(first=5, keep=1), "keep=1: must be at least 2"),
        (lambda: Population(every=0), "at least 1"),
        (lambda: Population(every=1, share=0.6), r"\(0, 0.5\]"),
        (lambda: Population(every=1, change=1.0), r"in \(0, 1\)"),
        (lambda: Population(every=1, perturbed=("batch_size",)), "members of an array differ in lr, momentum"),
        (lambda: planned(halving=Halving(2)), "Use one of the two"),
        (lambda: TrialArray(planned(Population(1, perturbed=("beta1",))), drawn(2)), "SGD has none of them"),
    ]
)


def test_only_what_an_optimizer_has_is_perturbed() -> None:
    space = Space({"lr": parse_domain("log:1e-3:1e-1"), "optimizer": parse_domain("sgd,adamw")})
    both = planned(Population(every=4, perturbed=("lr", "momentum", "beta1")), schedule="constant")
    found = sweep(both, RandomSampler(space, seed=0), 6, together=6)
    moved = {name for each in found for copy in each.copies for name in copy.hyperparameters}
    assert moved == {"lr", "momentum", "beta1", "optimizer"}
    for each in found:
        for copy in each.copies:
            assert ("momentum" in copy.hyperparameters) == (copy.hyperparameters["optimizer"] == "sgd")
