# SPDX-License-Identifier: Apache-2.0
"""What is recommended: never what is slower than AllReduce(), and where another recipe would win."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from thinwire import ConfigError
from thinwire.plan import search
from thinwire.plan.candidates import CANDIDATES, DENSE, Accuracy, AccuracyTable, measured, read_table
from thinwire.plan.predict import ModelTime
from thinwire.plan.search import SLOWEST, Job, Option, Planner, choose
from thinwire.simulate import Network
from thinwire.strategies.base import Strategy
from thinwire.strategies.recipe import parse

FEW = (DENSE, "AllReduce(codec=Bf16())", "LocalSGD(period=4)", "DiLoCo(period=32)")


def nothing(_: Strategy) -> Sequence[float]:
    return [0.0]


def planner(bits_per_second: float, recipes: Sequence[str] = FEW, *, workers: int = 4) -> Planner:
    job = Job([(250, 1000)] * 4, workers, Network(bits_per_second=bits_per_second), ModelTime(0.02, 0.03))
    return Planner(job, recipes, own=nothing)


def table(**factors: float) -> AccuracyTable:
    rows = {repr(parse(recipe)): Accuracy(factor, factor, factor, 1, 0) for recipe, factor in factors.items()}
    return AccuracyTable("invented", "none", rows)


def test_all_reduce_is_recommended_where_the_link_is_fast() -> None:
    assert choose(planner(1e11).options()).recipe == DENSE


def test_what_sends_less_is_recommended_where_the_link_is_slow() -> None:
    options = planner(1e7).options()
    chosen = choose(options)
    assert chosen.recipe != DENSE
    assert chosen.seconds < next(each for each in options if each.recipe == DENSE).seconds


@pytest.mark.parametrize("bits_per_second", [1e7, 1e8, 1e9, 1e10, 1e11])
def test_what_is_recommended_is_never_slower_than_all_reduce(bits_per_second: float) -> None:
    options = planner(bits_per_second).options()
    dense = next(each for each in options if each.recipe == DENSE)
    assert choose(options).to_loss <= dense.to_loss * (1 + 1e-9) or choose(options) is dense


def test_where_the_choice_changes_another_recipe_is_chosen_beyond_and_the_same_before() -> None:
    found = planner(1e10)
    assert found.choice_at(found.job.network).recipe == DENSE
    (crossing,) = found.crossings()
    assert crossing.side == "slower" and SLOWEST < crossing.bits_per_second < 1e10
    at = {
        factor: found.choice_at(replace(found.job.network, bits_per_second=factor * crossing.bits_per_second)).recipe
        for factor in (0.94, 1.06)
    }
    assert at[1.06] == DENSE and at[0.94] == crossing.recipe
    assert crossing.factor == pytest.approx(crossing.bits_per_second / 1e10)


def test_steps_that_a_recipe_needs_more_count_and_those_that_it_needs_less_do_not() -> None:
    factors = {DENSE: 1.0, "LocalSGD(period=4)": 1.2, "DiLoCo(period=32)": 0.5}
    options = replace(planner(1e8, list(factors)), table=table(**factors)).options()
    steps = {each.recipe: each.steps for each in options}
    assert steps == {DENSE: 1.0, "LocalSGD(period=4)": 1.2, "DiLoCo(period=32)": 1.0}


def test_what_was_not_measured_is_shown_but_not_recommended() -> None:
    options = planner(1e7, (DENSE, "LocalSGD(period=64)")).options()
    assert choose(options).recipe == DENSE
    assert options[-1].recipe == "LocalSGD(period=64)" and options[-1].accuracy is None


def test_what_cannot_serve_is_left_out_in_words() -> None:
    def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    found = planner(1e8, (DENSE, "AllReduce(codec=ErrorFeedback(OneBit()))"))
    options = replace(found, job=replace(found.job, optimizer=adamw)).options()
    assert "AdamW" in options[-1].refused and choose(options).recipe == DENSE
    with pytest.raises(ConfigError, match="none of the 1 recipes can serve here"):
        choose([Option("Local()", None, None, "no")])


@pytest.mark.parametrize("elements", [7, 9, 25, 1000])
def test_few_tensors_have_all_elements_also_of_a_tiny_model(elements: int) -> None:
    shapes = [(1,)] * 6 + [(elements - 6,)]
    few = Job(shapes, 4, Network(bits_per_second=1e8), ModelTime(0.02, 0.03)).coarse()
    assert few.elements == elements and len(few.shapes) == 6 and all(size > 0 for (size,) in few.shapes)


def test_every_candidate_can_be_read_and_most_were_measured() -> None:
    known = [recipe for recipe in CANDIDATES if measured().of(recipe) is not None]
    assert DENSE in known and len(known) >= 0.9 * len(CANDIDATES)
    assert all(0 < each.least <= each.factor <= each.most <= 2 for each in measured().rows.values())


def test_a_run_that_did_not_reach_the_loss_counts_with_the_most_steps_that_it_had() -> None:
    run = {"recipe": "PushSum()", "task": "digits", "rate": 2.0, "dense_steps": 10, "most_steps": 20}
    dense = {**run, "recipe": DENSE, "rate": 0.5, "steps": 10}
    runs = [dense, {**run, "steps": 12}, {**run, "steps": None}]
    tries = [{**run, "steps": 11}, {**run, "steps": 13, "rate": 0.5}]
    content = {"provenance": "", "command": "", "runs": runs, "tries": tries}
    found = read_table(content)
    assert found.of("PushSum()") == Accuracy(1.6, 1.2, 2.0, 2, 1, {"digits": 4.0})
    assert found.of(DENSE) == Accuracy(1.0, 1.0, 1.0, 1, 0, {"digits": 1.0})
    assert read_table(content, tuned=False).of("PushSum()") == Accuracy(1.3, 1.3, 1.3, 1, 0, {"digits": 1.0})


def test_what_strategies_compute_takes_longer_where_workers_share_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "own_work", lambda *_, **__: [0.1])
    job = replace(planner(1e11).job, sharing=3.0)
    (option,) = Planner(job, (DENSE,)).options()
    assert option.prediction is not None and option.prediction.own_seconds == pytest.approx(0.3)
    assert option.seconds == pytest.approx(0.05 + 0.3, rel=1e-2)
