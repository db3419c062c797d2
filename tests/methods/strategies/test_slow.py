# SPDX-License-Identifier: Apache-2.0
"""What must hold for strategies that average now and then: Local SGD and slow momentum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import common as oracles
from tests.oracles.common import Descent
from tests.problems import (
    Irregular,
    Quadratic,
    Regression,
    average_outside,
    distance,
    flat,
    quadratic,
    together,
    train,
    watched,
)
from thinwire import (
    AllReduce,
    Comm,
    ConfigError,
    Gossip,
    Local,
    LocalSGD,
    PushSum,
    Replica,
    SlowMo,
    Strategy,
)

DOUBLE = torch.float64


@dataclass(frozen=True)
class Averaged(Strategy):
    """Some strategy, and an exact average every few steps."""

    base: Strategy
    period: int

    def start(self, r: Replica) -> None:
        self.base.start(r)

    def before_step(self, r: Replica) -> None:
        self.base.before_step(r)

    def after_step(self, r: Replica) -> None:
        self.base.after_step(r)
        if r.step % self.period == 0:
            average_outside(self.base, r)


@pytest.mark.parametrize("base", [Local(), PushSum(), PushSum(Irregular()), Gossip(), Gossip(order="after")], ids=str)
def test_without_momentum_the_slow_step_is_an_exact_average(base: Strategy) -> None:
    problem = Regression(3, 14, torch.float32)
    slow = together(3, SlowMo(base, period=4, momentum=0.0, lr=1.0), problem, [0.1] * 14, momentum=0.9)
    assert torch.equal(slow, together(3, Averaged(base, 4), problem, [0.1] * 14, momentum=0.9))


def test_the_anchor_is_where_the_last_slow_step_ended() -> None:
    for strategy in (SlowMo(period=4), SlowMo(period=4, momentum=0.0)):
        seen = watched(3, strategy, quadratic(3, DOUBLE), [0.1] * 10, slow_vectors)
        x, anchor, _ = seen.chunk(3, dim=-1)
        assert torch.equal(anchor[3:7], x[3].expand(4, -1, -1))
        assert torch.equal(anchor[7:], x[7].expand(3, -1, -1))


def test_without_momentum_slow_steps_over_local_are_local_sgd() -> None:
    problem = Regression(3, 14, torch.float32)
    slow = together(3, SlowMo(period=4, momentum=0.0, lr=1.0), problem, [0.1] * 14, momentum=0.9)
    assert torch.equal(slow, together(3, LocalSGD(4), problem, [0.1] * 14, momentum=0.9))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_slow_steps_after_every_step_are_all_reduce_with_heavy_ball(n: int) -> None:
    problem = Regression(n, 20, DOUBLE)
    slow = together(n, SlowMo(period=1, momentum=0.8), problem, [0.1] * 20)
    assert distance(slow, together(n, AllReduce(), problem, [0.1] * 20, momentum=0.8)) < 1e-12


def test_local_sgd_after_every_step_is_all_reduce() -> None:
    problem = Regression(4, 20, DOUBLE)
    local = together(4, LocalSGD(1), problem, [0.1] * 20)
    assert distance(local, together(4, AllReduce(), problem, [0.1] * 20)) < 1e-14


def slow_vectors(r: Replica) -> Tensor:
    return torch.cat([r.x, r.state["anchor"], r.state["slow"]])


def test_after_a_slow_step_all_workers_hold_the_same_bits() -> None:
    problem = Regression(3, 8, torch.float32)
    seen = watched(3, SlowMo(PushSum(Irregular()), period=4), problem, [0.1] * 8, slow_vectors, momentum=0.9)
    for step in (3, 7):
        assert torch.equal(seen[step], seen[step, :1].expand_as(seen[step]))
    assert not torch.equal(seen[5, 0], seen[5, 1])


def test_slow_momentum_is_blockwise_model_update_filtering() -> None:
    problem = Regression(4, 18, DOUBLE)
    slow = together(4, SlowMo(period=6, momentum=0.75), problem, [0.1] * 18)
    start = problem.start.expand(4, -1)
    block = oracles.block_momentum(problem.gradient, start, Descent([0.1] * 18), 18, period=6, momentum=0.75)
    assert distance(slow, block) < 1e-12


@pytest.mark.parametrize("pull", [0.5, 1.0])
def test_one_worker_without_slow_momentum_is_lookahead(pull: float) -> None:
    problem = Regression(1, 20, DOUBLE)
    slow = together(1, SlowMo(period=5, momentum=0.0, lr=pull), problem, [0.1] * 20, momentum=0.9)
    start = problem.start.expand(1, -1)
    ahead = oracles.lookahead(problem.gradient, start, Descent([0.1] * 20, momentum=0.9), 20, period=5, pull=pull)
    assert distance(slow, ahead) < 1e-12


@pytest.mark.parametrize("base", [Local(), PushSum()], ids=str)
def test_a_round_at_a_learning_rate_of_zero_moves_nothing_and_momentum_decays(base: Strategy) -> None:
    rates = [0.1] * 4 + [0.0] * 4 + [0.1] * 4
    seen = watched(4, SlowMo(base, period=4, momentum=0.5), quadratic(4, DOUBLE), rates, slow_vectors)
    x, _, slow = seen.chunk(3, dim=-1)
    assert torch.equal(x[7], x[3])
    assert torch.equal(slow[7], 0.5 * slow[3])
    assert seen.isfinite().all()
    assert distance(x[11], x[7]) > 1e-3


def test_training_at_a_learning_rate_of_zero_moves_nothing() -> None:
    seen = watched(3, SlowMo(period=3), quadratic(3, DOUBLE), [0.0] * 6, slow_vectors)
    x, anchor, slow = seen.chunk(3, dim=-1)
    assert torch.equal(x, torch.ones_like(x))
    assert torch.equal(anchor, torch.ones_like(x))
    assert torch.equal(slow, torch.zeros_like(x))


def test_the_slow_step_divides_by_the_mean_rate_of_its_round() -> None:
    problem = quadratic(2, DOUBLE)
    seen = watched(2, SlowMo(period=2, momentum=0.5), problem, [0.1, 0.3], slow_vectors)
    local = oracles.local_sgd(problem.gradient, torch.ones(2, 3, dtype=DOUBLE), Descent([0.1, 0.3]), 2, period=2)
    slow = seen[-1].chunk(3, dim=-1)[2]
    assert torch.allclose(slow, (1 - local) / 0.2, rtol=0, atol=1e-14)


def test_each_parameter_group_has_a_slow_rate_of_its_own() -> None:
    n, factors = 3, [1.0, 0.5, 0.0]
    problem = Regression(n, 20, DOUBLE)
    warming = [0.01 * (k + 1) for k in range(20)]
    sizes = [20, 4, 8, 2]
    factor = torch.cat([torch.full((size,), factors[i % 3], dtype=DOUBLE) for i, size in enumerate(sizes)])
    slow = together(n, SlowMo(period=5, momentum=0.6, lr=0.9), problem, warming, factors=factors, momentum=0.9)
    # A zero rate must not be divided by; the oracle gets one so small that it moves nothing either.
    rates = [rate * factor.clamp(min=1e-30) for rate in warming]
    oracle = partial(oracles.slow_momentum, period=5, momentum=0.6, lr=0.9)
    wanted = oracle(problem.gradient, problem.start.expand(n, -1), Descent(rates, momentum=0.9), 20)
    assert distance(slow, wanted) < 1e-12
    assert torch.equal(slow[0, 24:32], problem.start[24:32])


def test_slow_momentum_does_not_depend_on_the_unit_of_the_learning_rate() -> None:
    @dataclass(frozen=True)
    class Slope(Quadratic):
        def loss(self, model: torch.nn.Module, rank: int, step: int) -> Tensor:
            return (model() * self.centre[rank]).sum()

    problem = Slope(torch.ones(2, dtype=DOUBLE), quadratic(2, DOUBLE).centre)
    strategy = SlowMo(period=3, momentum=0.5)
    steady, halved = (
        watched(2, strategy, problem, rates, lambda r: r.state["slow"])
        for rates in ([0.1] * 9, [0.1] * 3 + [0.05] * 3 + [0.2] * 3)
    )
    assert torch.allclose(steady, halved, rtol=1e-12, atol=0)
    assert steady[-1].abs().min() > 0


@pytest.mark.parametrize("base", [PushSum(Irregular()), Gossip(), Gossip(order="after")], ids=str)
def test_after_a_slow_step_weights_are_one_and_nothing_is_in_flight(base: Strategy) -> None:
    def body(comm: Comm) -> tuple[bool, bool]:
        worker = train(comm, SlowMo(base, period=3), quadratic(3, DOUBLE), [0.1] * 6)
        (r,) = worker.replicas
        unit = "mass" not in r.state or bool(r.state["mass"][-1] == 1)
        return unit, not r.inflight

    assert thinwire.run_threads(3, body) == [(True, True)] * 3


@pytest.mark.parametrize("curvature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_rounds_on_a_quadratic_contract_for_every_momentum(curvature: float, momentum: float) -> None:
    strategy = SlowMo(period=4, momentum=momentum, lr=0.9)

    def one_round(x: float, u: float) -> list[float]:
        r = Replica(torch.tensor([x], dtype=DOUBLE), torch.zeros(1), thinwire.CountingComm(0, 1), lr=lambda: 0.1)
        strategy.start(r)
        r.state["slow"].fill_(u)
        for _ in range(4):
            r.x.sub_(0.1 * curvature * r.x)
            r.step += 1
            strategy.after_step(r)
        return [float(r.x), float(r.state["slow"])]

    matrix = torch.tensor([one_round(1.0, 0.0), one_round(0.0, 1.0)], dtype=DOUBLE).T
    assert torch.linalg.eigvals(matrix).abs().max() < 1


def test_local_sgd_converges_to_its_biased_fixed_point() -> None:
    rate, period = 0.3, 5
    curvature = torch.tensor([1.0, 0.1], dtype=DOUBLE)
    problem = Quadratic(curvature, torch.tensor([[1.0, 0.0], [-1.0, 2.0]], dtype=DOUBLE))
    reached = together(2, LocalSGD(period), problem, [rate] * 300)
    weights = 1 - (1 - rate * curvature) ** period
    fixed = (weights[:, None] * problem.centre).sum(0) / weights.sum()
    minimum = (curvature[:, None] * problem.centre).sum(0) / curvature.sum()
    assert torch.allclose(reached, fixed.expand(2, -1), rtol=0, atol=1e-12)
    assert (fixed - minimum).abs().min() > 0.1
    averaged = together(2, AllReduce(), problem, [rate] * 200)
    assert torch.allclose(averaged, minimum.expand(2, -1), rtol=0, atol=1e-12)


def test_where_all_workers_see_the_same_local_sgd_is_gradient_descent() -> None:
    one = quadratic(1, DOUBLE)
    same = Quadratic(one.curvature.expand(4), one.centre.expand(4, -1))
    assert torch.equal(together(4, LocalSGD(3), same, [0.1] * 9)[0], together(1, Local(), one, [0.1] * 9)[0])


def test_local_sgd_leaves_all_workers_equal_after_a_round_and_calls_once_for_it() -> None:
    def body(comm: Comm) -> tuple[Tensor, int]:
        worker = train(comm, LocalSGD(4), Regression(3, 12, torch.float32), [])
        before = comm.meter.messages
        worker = train(comm, LocalSGD(4), Regression(3, 12, torch.float32), [0.1] * 12, momentum=0.9)
        return flat(worker.model), comm.meter.messages - 2 * before

    ended = thinwire.run_threads(3, body)
    assert all(torch.equal(x, ended[0][0]) for x, _ in ended)
    assert [calls for _, calls in ended] == [3, 3, 3]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(0), "period=0: must be at least 1"),
        (lambda: LocalSGD(2.5), r"period must be a whole number"),
        (lambda: LocalSGD(True), r"period must be a whole number"),
        (lambda: SlowMo(12), r"SlowMo\(base=12\): base must be a Strategy"),
        (lambda: SlowMo(LocalSGD), r"base must be a Strategy. Write LocalSGD\(\)"),
        (lambda: SlowMo(SlowMo()), r"outer steps cannot be nested. Use its base, Local\(\)"),
        (lambda: SlowMo(period=-1), "period=-1: must be at least 1"),
        (lambda: SlowMo(momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
        (lambda: SlowMo(momentum=float("nan")), r"momentum=nan: must lie in \[0, 1\)"),
        (lambda: SlowMo(lr=0.0), "lr=0.0: must be positive"),
        (lambda: SlowMo(lr=float("inf")), "positive and finite"),
        (lambda: Gossip(order="later"), "order must be 'while' or 'after'"),
        (lambda: PushSum("ring"), "topology must be a Topology"),
    ],
)
def test_recipes_that_cannot_work_are_refused_with_the_value_and_the_rule(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError, match=words):
        make()
