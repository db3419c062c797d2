# SPDX-License-Identifier: Apache-2.0
"""What is recommended: never what is slower than AllReduce(), and where another recipe would win."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grids import fast_where
from tests.rules import for_each
from thinwire import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.recipe import parse
from thinwire.planning.plan import search
from thinwire.planning.plan.candidates import CANDIDATES, DENSE, Accuracy, AccuracyTable, measured, read_table
from thinwire.planning.plan.predict import ModelTime, Prediction
from thinwire.planning.plan.search import SLOWEST, Job, Option, Planner, choose, ranked, within_noise
from thinwire.planning.plan.timings import Timings
from thinwire.planning.simulate import Network

FEW = (DENSE, "AllReduce(codec=Bf16())", "LocalSGD(period=4)", "DiLoCo(period=32)")


class Nothing(Timings):
    """As if strategies computed nothing themselves."""

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        return [0.0]


def planner(bits_per_second: float, recipes: Sequence[str] = FEW, *, workers: int = 4) -> Planner:
    job = Job([(250, 1000)] * 4, workers, Network(bits_per_second=bits_per_second), ModelTime(0.02, 0.03))
    return Planner(job, recipes, timings=Nothing())


@cache
def options_at(bits_per_second: float) -> tuple[Option, ...]:
    """The options that several tests look at."""
    return tuple(planner(bits_per_second).options())


def table(**factors: float) -> AccuracyTable:
    rows = {repr(parse(recipe)): Accuracy(factor, factor, factor, 1, 0) for recipe, factor in factors.items()}
    return AccuracyTable("invented", "none", rows)


@pytest.mark.slow
def test_all_reduce_is_recommended_where_the_link_is_fast() -> None:
    assert choose(options_at(1e11)).recipe == DENSE


def test_what_sends_less_is_recommended_where_the_link_is_slow() -> None:
    options = options_at(1e7)
    chosen = choose(options)
    assert chosen.recipe != DENSE
    assert chosen.seconds < next(each for each in options if each.recipe == DENSE).seconds


@pytest.mark.parametrize("bits_per_second", fast_where(lambda rate: rate != 1e10, [1e7, 1e8, 1e9, 1e10, 1e11]))
def test_what_is_recommended_is_never_slower_than_all_reduce(bits_per_second: float) -> None:
    options = options_at(bits_per_second)
    dense = next(each for each in options if each.recipe == DENSE)
    assert choose(options).to_loss <= dense.to_loss * (1 + 1e-9) or choose(options) is dense


@pytest.mark.slow
def test_where_the_choice_changes_another_recipe_is_chosen_beyond_and_the_same_before() -> None:
    found = planner(1e10)

    def chosen(network: Network) -> str:
        return choose([found.at(recipe, network) for recipe in FEW]).recipe

    assert chosen(found.job.network) == DENSE
    (crossing,) = found.crossings(found.options())
    assert crossing.side == "slower" and SLOWEST < crossing.bits_per_second < 1e10
    at = {
        factor: chosen(replace(found.job.network, bits_per_second=factor * crossing.bits_per_second))
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


@for_each([7, 9, 25, 1000])
def test_few_tensors_have_all_elements_also_of_a_tiny_model(elements: int) -> None:
    shapes = [(1,)] * 6 + [(elements - 6,)]
    few = Job(shapes, 4, Network(bits_per_second=1e8), ModelTime(0.02, 0.03)).coarse()
    assert few.elements == elements and len(few.shapes) == 6 and all(size > 0 for (size,) in few.shapes)


def test_every_candidate_can_be_read_and_most_were_measured() -> None:
    known = [recipe for recipe in CANDIDATES if measured().of(recipe) is not None]
    assert DENSE in known and len(known) >= 0.9 * len(CANDIDATES)
    assert "AllReduce(codec=PowerSGD(rank=4))" in known
    for each in measured().rows.values():
        assert 0 < each.least <= each.most and (each.factor < inf) is (not each.missed)


def test_a_run_that_did_not_reach_the_loss_counts_as_never() -> None:
    run = {"recipe": "PushSum()", "task": "digits", "rate": 2.0, "dense_steps": 10, "most_steps": 20}
    dense = {**run, "recipe": DENSE, "rate": 0.5, "steps": 10}
    never = {**run, "recipe": "DiLoCo()", "steps": None}
    runs = [dense, {**run, "steps": 12}, {**run, "steps": 13}, {**run, "steps": None}, never]
    tries = [{**run, "steps": 11}, {**run, "steps": 13, "rate": 0.5}]
    content = {"provenance": "", "command": "", "runs": runs, "tries": tries}
    found = read_table(content)
    assert found.of("PushSum()") == Accuracy(inf, 1.2, 1.3, 3, 1, {"digits": 4.0})
    assert found.of("DiLoCo()") == Accuracy(inf, inf, inf, 1, 1, {"digits": 4.0})
    assert found.of(DENSE) == Accuracy(1.0, 1.0, 1.0, 1, 0, {"digits": 1.0})
    assert read_table(content, tuned=False).of("PushSum()") == Accuracy(1.3, 1.3, 1.3, 1, 0, {"digits": 1.0})


def option(recipe: str, step: float, accuracy: Accuracy | None) -> Option:
    return Option(recipe, Prediction(parse(recipe), step, 0.01, 0.0, 1e6, 1e6, 1e6), accuracy)


EXACT = Accuracy(1.0, 1.0, 1.0, 5, 0)
SOMETIMES = Accuracy(inf, 0.5, 1.1, 5, 2)
NEVER = Accuracy(inf, inf, inf, 5, 5)


def test_what_missed_the_loss_in_a_measured_run_is_ranked_behind_all_that_reached_it_and_not_recommended() -> None:
    options = ranked(
        [
            option("SlowMo()", 0.01, None),
            option("DiLoCo()", 0.01, NEVER),
            option("LocalSGD(period=8)", 0.02, SOMETIMES),
            option(DENSE, 1.0, EXACT),
            option("PushSum()", 0.5, Accuracy(1.5, 1.2, 1.8, 5, 0)),
        ]
    )
    assert [each.recipe for each in options] == ["PushSum()", DENSE, "LocalSGD(period=8)", "DiLoCo()", "SlowMo()"]
    assert [each.to_loss for each in options[2:]] == [inf] * 3
    assert choose(options).recipe == "PushSum()"
    with pytest.raises(ConfigError, match=r"DiLoCo\(\): never in 5 of 5 runs.*Include AllReduce\(\)"):
        choose([option("DiLoCo()", 0.01, NEVER)])


@for_each([0.97, 1.0, 1.03])
def test_of_recipes_within_noise_the_simplest_is_recommended_whichever_is_the_fastest(noise: float) -> None:
    """Two timings of one codec differ by a few percent."""
    options = [
        option("LocalSGD(period=8)", 0.100, EXACT),
        option("AllReduce(codec=Bf16())", 0.101 * noise, EXACT),
        option(DENSE, 0.2, EXACT),
    ]
    near = [each.recipe for each in within_noise(options)]
    assert near == ["AllReduce(codec=Bf16())", "LocalSGD(period=8)"]
    assert choose(options).recipe == near[0]


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1])
def test_what_would_change_the_choice_is_another_recipe_also_where_few_tensors_would_choose_otherwise(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AllReduce() waits for its bytes, and few tensors are predicted `factor` times as slow; PushSum() never waits."""

    def predicted(strategy: Strategy, *, parameters: Sequence[object], network: Network, **_: object) -> Prediction:
        waits = 1e7 / network.bits_per_second if strategy == parse(DENSE) else 0.104
        waits *= 1.0 if len(parameters) > 6 else factor if strategy == parse(DENSE) else 1.0
        return Prediction(strategy, 0.01 + waits, 0.01, 0.0, 1e6, 1e6, 1e6)

    monkeypatch.setattr(search, "predict", predicted)
    job = Job([(10,)] * 7, 4, Network(bits_per_second=1e8), ModelTime(0.005, 0.005))
    found = Planner(job, (DENSE, "PushSum()"), timings=Nothing(), table=table(**{DENSE: 1.0, "PushSum()": 1.0}))
    options = found.options()
    assert choose(options).recipe == DENSE  # 0.110 s, within noise of 0.114
    (crossing,) = found.crossings(options)
    assert (crossing.recipe, crossing.side) == ("PushSum()", "slower")
    # Where 0.01 + 1e7 / rate is 1.05 times 0.114.
    right = 1e7 / (1.05 * 0.114 - 0.01)
    assert 0.95 * right <= crossing.bits_per_second <= right * (1 + 0.3 * abs(factor - 1))


def test_what_was_timed_is_kept_and_measured_again_only_when_asked(tmp_path: Path) -> None:
    path, calls = tmp_path / "plan" / "timings.json", []

    def measure() -> list[float]:
        calls.append(1)
        return [float(len(calls))]

    assert [Timings(path).get("a codec", measure) for _ in range(2)] == [[1.0], [1.0]]
    later = Timings(path)
    assert (later.get("another", measure), later.get("a codec", measure)) == ([2.0], [1.0])
    assert (later.kept, later.measured) == (1, 1)
    assert Timings(path, again=True).get("a codec", measure) == [3.0] and Timings(path).get("a codec", measure) == [3.0]
    # What was measured beside other programs is too long.
    assert Timings(path, busy=True).get("third", measure) == [4.0] == Timings(path, busy=True).get("third", measure)
    assert Timings(path).get("third", measure) == [5.0] == Timings(path).get("third", measure)
    for broken in (b"{", b"[]", b'{"a codec, 1 threads": 3}'):
        path.write_bytes(broken)
        assert Timings(path).get("a codec", lambda: [7.0]) == [7.0]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_two_plans_of_one_job_give_one_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([0.001, 0.002, 0.003, 0.004])
    monkeypatch.setattr(search, "own_work", lambda *_, **__: [next(seconds)])
    found = [replace(planner(1e8, FEW[:2]), timings=Timings(tmp_path / "timings.json")).options() for _ in range(2)]
    assert found[0] == found[1]


def test_what_strategies_compute_takes_longer_where_workers_share_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "own_work", lambda *_, **__: [0.1])
    job = replace(planner(1e11).job, sharing=3.0)
    (option,) = Planner(job, (DENSE,)).options()
    assert option.prediction is not None and option.prediction.own_seconds == pytest.approx(0.3)
    assert option.seconds == pytest.approx(0.05 + 0.3, rel=1e-2)
