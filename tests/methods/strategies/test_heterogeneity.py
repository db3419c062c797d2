# SPDX-License-Identifier: Apache-2.0
"""How much workers' gradients differ: estimates against known values, and recommendations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.methods.strategies.local_runs import adamw, begin, go_on, sent, sgd
from tests.problems import Problem, Regression, Vector, together
from tests.rules import refusals
from thinwire import (
    AllReduce,
    Bf16,
    Comm,
    ConfigError,
    ErrorFeedback,
    Gossip,
    Local,
    LocalSGD,
    MajorityVote,
    NodeAverage,
    OneBit,
    PowerSGD,
    RandomK,
    SlowMo,
    Strategy,
    TopK,
    Worker,
    parse,
)
from thinwire.methods.strategies.local.minibatch_local_sgd import MinibatchLocalSGD
from thinwire.methods.strategies.wrappers.heterogeneity import NAMES, recommend
from thinwire.methods.strategies.wrappers.probe import Probe
from thinwire.planning.plan import explain
from thinwire.worker.worker import internals_of

DOUBLE = torch.float64


@dataclass(frozen=True)
class Slopes:
    """Worker i's loss is linear; its slope is drawn at each step around a mean of its own."""

    size: int
    steps: int
    width: int = 40
    apart: float = 1.0
    noise: float = 2.0

    @property
    def start(self) -> Tensor:
        return torch.zeros(self.width, dtype=DOUBLE)

    @cached_property
    def own(self) -> Tensor:
        draw = torch.Generator().manual_seed(1)
        return 0.5 + self.apart * torch.randn(self.size, self.width, generator=draw, dtype=DOUBLE)

    @cached_property
    def slopes(self) -> Tensor:
        """(steps, size, width)."""
        draw = torch.Generator().manual_seed(2)
        return self.own + self.noise * torch.randn(self.steps, *self.own.shape, generator=draw, dtype=DOUBLE)

    def model(self) -> nn.Module:
        return Vector(self.start, [1, 20, self.width - 21])

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        return self.slopes[step, rank] @ model()

    def gradient(self, x: Tensor, step: int) -> Tensor:
        return self.slopes[step]

    @property
    def truth(self) -> tuple[float, float, float]:
        mean = self.own.mean(0)
        apart = (self.own - mean).square().sum(1).mean()
        return float(apart), self.noise**2 * self.width, float(mean @ mean)


def direct(now: Tensor, before: Tensor, steps: int = 1) -> list[float]:
    """The estimates from all workers' gradients at two exchanges, by their definition."""
    n = len(now)
    off, off_before = now - now.mean(0), before - before.mean(0)
    apart = (off * off_before).sum() / n
    noise = (off.square().sum() / 2 + off_before.square().sum() / 2 - (off * off_before).sum()) / (n - 1)
    return [float(apart), float(noise) * steps, float(now.mean(0).square().sum() - noise / n)]


def measured(comm: Comm, strategy: Strategy, problem: Problem, steps: int, **settings: Any) -> list[dict[str, float]]:
    """The metrics after each step."""
    worker = begin(comm, strategy, problem, sgd(0.05, 0.0))
    seen: list[dict[str, float]] = []
    for step in range(steps):
        go_on(worker, problem, range(step, step + 1), **settings)
        seen.append(internals_of(worker).metrics(clear=True))
    worker.detach()
    return seen


def figures(seen: dict[str, float]) -> list[float]:
    assert tuple(seen) == NAMES
    return [seen[name] for name in NAMES]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_measurement_is_as_it_is_defined(n: int) -> None:
    problem = Slopes(n, 8)
    for seen in thinwire.run_threads(n, lambda comm: measured(comm, Probe(AllReduce(), every=4, keep=0.0), problem, 8)):
        for step in (3, 7):
            assert figures(seen[step]) == pytest.approx(direct(*problem.slopes[[step, step - 1]]), rel=1e-12)


@pytest.mark.parametrize(("n", "period"), [(2, 1), (3, 4)])
def test_a_measurement_of_averages_computes_gradients_from_displacements(n: int, period: int) -> None:
    problem = Slopes(n, 4 * period)
    rounds = problem.slopes.unflatten(0, (4, period)).mean(1)
    for strategy in (
        Probe(LocalSGD(period), every=2, keep=0.0),
        SlowMo(Probe(Local(), every=2, keep=0.0), period=period, momentum=0.5),
    ):
        for seen in thinwire.run_threads(
            n, lambda comm, strategy=strategy: measured(comm, strategy, problem, 4 * period)
        ):
            assert [i for i, each in enumerate(seen) if each] == [2 * period - 1, 4 * period - 1]
            for r in (1, 3):
                wanted = direct(rounds[r], rounds[r - 1], period)
                assert figures(seen[(r + 1) * period - 1]) == pytest.approx(wanted, rel=1e-9)


def test_metrics_are_exponential_moving_averages() -> None:
    problem = Slopes(3, 6)
    (seen, _, _) = thinwire.run_threads(3, lambda comm: measured(comm, Probe(AllReduce(), 2, 0.5), problem, 6))
    count = torch.tensor([direct(problem.slopes[k], problem.slopes[k - 1]) for k in (1, 3, 5)], dtype=DOUBLE)
    weights = torch.tensor([0.25, 0.5, 1.0], dtype=DOUBLE)
    assert figures(seen[5]) == pytest.approx((weights @ count / weights.sum()).tolist(), rel=1e-12)


@pytest.mark.parametrize("base", [AllReduce(), AllReduce(Bf16()), LocalSGD(3, warmup_steps=4)], ids=str)
def test_measuring_changes_no_bit_of_training(base: Strategy) -> None:
    problem, rates = Regression(3, 12, torch.float32), [0.05] * 12
    assert torch.equal(together(3, Probe(base, every=2), problem, rates), together(3, base, problem, rates))


def test_a_measurement_costs_three_numbers() -> None:
    problem = Regression(4, 12, torch.float32)
    for base, count in ((AllReduce(), 3), (LocalSGD(3), 1)):
        plain, probed = (sent(4, each, problem, 12, sgd(0.05, 0.0))[0] for each in (base, Probe(base, every=4)))
        assert probed[0] - plain[0] == pytest.approx(count * 2 * 3 / 4 * 24)
        assert probed[1] - plain[1] == count
    card = explain(Probe(AllReduce(), every=4), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == pytest.approx(2 * 3 / 4 * (4000 + 24 / 4))


def test_nothing_is_measured_while_some_workers_have_no_data() -> None:
    problem, lengths = Slopes(2, 12), [12, 5]

    def body(comm: Comm) -> list[int]:
        worker = begin(comm, Probe(AllReduce(), 4), problem, sgd(0.05, 0.0))
        found: list[int] = []
        for step in worker.join(range(lengths[comm.rank])):
            go_on(worker, problem, range(step, step + 1))
            found += [step] if internals_of(worker).metrics(clear=True) else []
        return found

    assert thinwire.run_threads(2, body)[0] == [3]


def test_a_measurement_that_was_started_by_fewer_workers_is_dropped() -> None:
    problem = Slopes(2, 8)

    def body(comm: Comm) -> list[int]:
        worker = begin(comm, Probe(AllReduce(), 4), problem, sgd(0.05, 0.0))
        found: list[int] = []
        for step in range(8):
            for replica in worker.replicas:
                replica.active = 1 if step == 2 else 2
            go_on(worker, problem, range(step, step + 1))
            found += [step] if internals_of(worker).metrics(clear=True) else []
        return found

    assert thinwire.run_threads(2, body) == [[7], [7]]


def test_one_worker_alone_sees_no_difference() -> None:
    for base in (AllReduce(), LocalSGD(2)):
        worker = go_on(begin(None, Probe(base, 2), Slopes(1, 8), sgd(0.05, 0.0)), Slopes(1, 8), range(8))
        assert worker.metrics() == {}


def test_a_learning_rate_of_zero_adds_nothing_to_the_figures() -> None:
    problem = Slopes(2, 4)

    def no_rate(worker: Worker, step: int) -> None:
        worker.optimizer.param_groups[0]["lr"] = 0.1 if step < 2 else 0.0

    seen = thinwire.run_threads(2, lambda c: measured(c, Probe(LocalSGD(2), 2), problem, 4, before_step=no_rate))[0]
    assert all(torch.tensor(figures(seen[3])).isfinite())


# -- recommendations ---------------------------------------------------------------------------------------------------


def metrics(dissimilarity: float, noise: float, gradient: float) -> dict[str, float]:
    return dict(zip(NAMES, (dissimilarity, noise, gradient), strict=True))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("seen", "method", "recipe", "words"),
    [
        ((0.0, 1.0, 1.0), "local", "LocalSGD(period=32)", "the common part is larger"),
        ((-0.1, 1.0, 1.0), "local", "LocalSGD(period=32)", "differ by 0 "),
        ((0.01, 1.0, 1.0), "local", "LocalSGD(period=10)", "in about 10 local steps"),
        (
            (4.0, 1.0, 1.0),
            "inner/outer",
            "MinibatchLocalSGD(period=8, inner=0.5)",
            "local steps scaled by 0.5",
        ),
        ((400.0, 8.0, 1.0), "minibatch", "MinibatchLocalSGD(period=2, inner=0.0)", "would drift"),
        ((400.0, 0.0, 1.0), "minibatch", "MinibatchLocalSGD(period=1, inner=0.0)", "AC-SA"),
        (
            (0.0, 1000.0, 1.0),
            "minibatch",
            "MinibatchLocalSGD(period=32, inner=0.0)",
            "loses nothing and does not drift",
        ),
        ((0.1, 1.0, -0.5), "minibatch", "MinibatchLocalSGD(period=32, inner=0.0)", "loses nothing"),
        ((0.0, 0.0, 0.0), "minibatch", "MinibatchLocalSGD(period=32, inner=0.0)", "loses nothing"),
    ],
)
def test_what_is_recommended_follows_from_the_figures(
    seen: tuple[float, float, float], method: str, recipe: str, words: str
) -> None:
    found = recommend(metrics(*seen), workers=4, period=8)
    assert (found.method, found.recipe) == (method, recipe)
    assert words in found.reason
    strategy = LocalSGD(found.period) if method == "local" else MinibatchLocalSGD(found.period, found.inner)
    assert parse(recipe) == strategy


test_recipes_that_cannot_be_measured_are_refused = refusals(
    [
        (lambda: Probe(every=1), "every=1: must be at least 2. A measurement takes two successive exchanges"),
        (lambda: Probe(keep=1.0), r"keep=1.0: must lie in \[0, 1\)"),
        (lambda: Probe(Gossip()), r"neither sends gradients .* SlowMo\(base=Probe\(base=Local\(\)\)\)"),
        (lambda: Probe(SlowMo()), "Put the probe inside"),
        (lambda: Probe(Probe()), "Put the probe inside"),
        (lambda: Probe(NodeAverage()), "nor ends rounds with a plain mean"),
        (lambda: Probe(LocalSGD(weights="samples")), "LocalSGD without weights"),
        (lambda: Probe(AllReduce(ErrorFeedback(TopK()))), "contain parts of earlier gradients, .* Measure AllReduce"),
        (lambda: Probe(LocalSGD(2, codec=ErrorFeedback(OneBit()))), "contain parts of earlier gradients"),
        (lambda: Probe(SlowMo(AllReduce(PowerSGD()))), "contain parts of earlier gradients"),
        (lambda: Probe(AllReduce(MajorityVote())), "may exceed the gradient, and would count as noise"),
        (lambda: Probe(AllReduce(RandomK())), "may exceed the gradient"),
        (lambda: recommend(metrics(1, 1, 1), workers=1), "at least 2 workers"),
        (lambda: recommend(metrics(1, 1, 1), workers=2, period=0), "1 step per round"),
        (lambda: recommend({}, workers=2), "gradient_dissimilarity=None: must be finite"),
        (lambda: recommend(metrics(1, float("nan"), 1), workers=2), "gradient_noise=nan: must be finite"),
    ]
)


@pytest.mark.parametrize("make", [adamw(), sgd(0.1, 0.9)])
def test_averages_under_other_optimizers_are_refused(make: Any) -> None:
    problem = Regression(1, 1, DOUBLE)
    with pytest.raises(ConfigError, match=r"needs SGD without momentum\. Measure AllReduce"):
        begin(None, Probe(LocalSGD()), problem, make)
    begin(None, Probe(AllReduce()), problem, make).detach()


def test_a_base_that_sends_nothing_in_the_backward_pass_is_refused_at_the_first_measurement() -> None:
    class Late(AllReduce):
        def on_gradient(self, r: Any, part: slice) -> Any:
            return None

    def body(comm: Comm) -> None:
        with pytest.raises(ConfigError, match="sends nothing during the backward pass"):
            measured(comm, Probe(Late(), 2), Slopes(2, 4), 4)

    thinwire.run_threads(2, body)
