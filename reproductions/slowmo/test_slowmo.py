# SPDX-License-Identifier: Apache-2.0
"""The claim about slow momentum is judged by its figures, whatever they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reproductions.shared.committed import Records
from reproductions.slowmo.claim import GOSSIP_PERIOD, QUICK, Scale, bytes_over_gossip, grids, judge
from reproductions.slowmo.steps import Figures, Plan, Trial, best, kept, run, tuned
from thinwire import Comm, PushSum, Strategy, attach, run_threads
from thinwire.lab.runs import Comparison, parse_recipe
from thinwire.lab.tasks import load

TUNED = ("AllReduce", "Local SGD", "SGP", "SlowMo over Local SGD", "SlowMo over SGP")
NAMES = (*TUNED, "SGP, for as many bytes")


def paced(local: float, gossip: float) -> Comparison:
    """Runs whose steps with slow momentum take so many times as long as without."""
    figures = [(1.0, 4.0), (local, 4.0), (1.0, 8.0), (gossip, 9.0)]
    rounds = tuple(
        ({"seconds_per_step": seconds, "payload_bytes_per_worker_per_step": nbytes},) for seconds, nbytes in figures
    )
    return Comparison(Path("nowhere"), ("", "", "", ""), rounds)


def ended(local: float = 0.02, gossip: float = 0.02, train: float = 0.02) -> dict[str, list[Figures]]:
    """Figures of three seeds in which slow momentum gains so much."""
    gains = {"SlowMo over Local SGD": local, "SlowMo over SGP": gossip}
    return {
        name: [
            Figures(0.1 - train * (name in gains), 0.2 + seed / 100 - gains.get(name, 0.0) * (1 + seed / 10), 0.9)
            for seed in range(3)
        ]
        for name in NAMES
    }


def with_more_steps(gain: float) -> dict[str, list[Figures]]:
    """The same, but SGP gains so much by the steps that slow momentum's bytes would pay for."""
    figures = ended()
    longer = [Figures(each.train_loss, each.held_out_loss - gain, each.accuracy) for each in figures["SGP"]]
    return figures | {"SGP, for as many bytes": longer}


CHOSEN = {name: Trial("LocalSGD(period=12)", 0.1) for name in NAMES}


def test_gains_on_both_bases_at_the_same_pace_hold() -> None:
    result = judge(CHOSEN, ended(), ended(), paced(1.0, 1.0))
    assert result.holds
    assert (result.value, result.least, result.most) == pytest.approx((0.022, 0.02, 0.024))
    assert "held-out loss 0.2100 to 0.1880" in result.measured
    assert result.details["payload, SlowMo over Local SGD over its base"] == "x 1.0000"
    assert result.details["payload, SlowMo over SGP over its base"] == "x 1.1250"


@pytest.mark.parametrize(
    ("figures", "pace"),
    [
        (ended(local=-0.01), (1.0, 1.0)),
        (ended(gossip=0.0), (1.0, 1.0)),
        (ended(train=-0.01), (1.0, 1.0)),
        (with_more_steps(0.03), (1.0, 1.0)),
        (ended(), (1.1, 1.0)),
        (ended(), (1.0, 1.2)),
    ],
)
def test_a_loss_on_either_base_or_a_slower_step_does_not_hold(
    figures: dict[str, list[Figures]], pace: tuple[float, float]
) -> None:
    assert not judge(CHOSEN, figures, ended(), paced(*pace)).holds
    if pace == (1.0, 1.0):
        assert not judge(CHOSEN, ended(), figures, paced(*pace)).holds


def test_a_step_may_be_slower_by_the_bytes_it_sends() -> None:
    assert judge(CHOSEN, ended(), ended(), paced(1.0, 1.15)).holds


def test_rounds_that_differ_about_the_pace_are_noise() -> None:
    even, late = paced(1.0, 1.0), paced(1.1, 1.0)
    rounds = tuple(a + b for a, b in zip(even.rounds, late.rounds, strict=True))
    result = judge(CHOSEN, ended(), ended(), replace(even, rounds=rounds))
    assert result.parts["time, SlowMo over Local SGD"] == "within noise"
    assert result.verdict.endswith("time, SlowMo over Local SGD: within noise")


@pytest.mark.parametrize("scale", [Scale(), QUICK], ids=["full", "quick"])
def test_every_method_is_given_as_many_trials_and_seeds_of_its_own(scale: Scale) -> None:
    found = grids(scale)
    assert set(found) == set(TUNED)
    assert len({len(trials) for trials in found.values()}) == 1
    assert not set(scale.seeds) & set(scale.tuning_seeds)
    for trials in found.values():
        assert len(set(trials)) == len(trials)
        assert all(parse_recipe(trial.recipe) for trial in trials)


def test_the_bytes_over_gossip_are_an_all_reduce_a_period() -> None:
    strategy = parse_recipe(f"SlowMo(base=PushSum(), period={GOSSIP_PERIOD})")
    assert isinstance(strategy, Strategy)

    def sent(strategy: Strategy) -> float:
        def body(comm: Comm) -> float:
            model = torch.nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            worker = attach(model, optimizer, strategy, comm=comm)
            before = comm.meter.payload_bytes
            for _ in range(GOSSIP_PERIOD):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            worker.detach()
            return comm.meter.payload_bytes - before

        return sum(run_threads(4, body))

    assert sent(strategy) / sent(PushSum()) == pytest.approx(bytes_over_gossip(4))


def test_the_trial_with_the_lowest_held_out_loss_is_chosen() -> None:
    trials = [Trial("Local()", lr) for lr in (0.1, 0.2, 0.3)]
    losses = {trials[0]: [0.5, 0.1], trials[1]: [0.2, 0.2], trials[2]: [0.3, 0.3]}
    assert best({trial: [Figures(0.0, loss, 0.0) for loss in each] for trial, each in losses.items()}) == trials[1]


def test_a_run_on_threads_learns_and_repeats_itself() -> None:
    pytest.importorskip("sklearn")
    plan = Plan(load("digits"), workers=2, steps=24, batch_size=8)
    told: list[tuple[Trial, int]] = []
    trial = Trial("SlowMo(period=6)", 0.05)
    runs = tuned(plan, {"SlowMo": [trial]}, [3], lambda each, seed: told.append((each, seed)))
    figures = runs["SlowMo"][trial][0]
    assert told == [(trial, 3)]
    assert figures == run(plan, trial, 3)
    assert figures.train_loss < 2.0
    assert figures.accuracy > 0.3


def test_runs_that_are_kept_are_not_run_again(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    plan, trial = Plan(load("digits"), workers=2, steps=4, batch_size=8), Trial("SlowMo(period=2)", 0.05)
    first = kept(Records(tmp_path / "new"))(plan, trial, 3)
    assert first == run(plan, trial, 3)
    file = tmp_path / "new" / "trials.jsonl"
    assert file.read_text().count("\n") == 1
    file.write_text(file.read_text().replace(f"{first.accuracy}", "0.125"))
    again = kept(Records(tmp_path / "new"))
    assert again(plan, trial, 3).accuracy == 0.125
    assert again(plan, trial, 4) == run(plan, trial, 4)


def test_the_learning_rate_rises_and_falls_to_a_tenth() -> None:
    pytest.importorskip("sklearn")
    plan = Plan(load("digits"), workers=2, steps=100, batch_size=8)
    rates = [plan.rate(1.0, step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)


def test_pictures_show_every_method(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from reproductions.slowmo.pictures import loss_picture, tuning_picture

    runs = {name: {Trial("Local()", lr): figures for lr in (0.1, 0.2)} for name, figures in ended().items()}
    for picture in (loss_picture(ended()), tuning_picture(runs)):
        assert picture.png(tmp_path).stat().st_size > 10_000
        assert all(name in picture.description for name in TUNED)
