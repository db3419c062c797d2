# SPDX-License-Identifier: Apache-2.0
"""The decentralised momentum methods equal their oracles, on threads and on processes, and keep their identities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.oracles import common as oracles
from tests.oracles import gossip as oracles_gossip
from tests.oracles.common import Descent, Mixing
from tests.pool import run_processes
from tests.problems import (
    Breathing,
    Problem,
    Quadratic,
    Regression,
    distance,
    flat,
    quadratic,
    together,
    train,
    watched,
)
from thinwire import AllReduce, Comm, Complete, Gossip, OnePeerExponential, Replica, Ring, SlowMo
from thinwire.methods.strategies import Strategy
from thinwire.methods.strategies.gossip.decentlam import DecentLaM
from thinwire.methods.strategies.gossip.double_averaging import DoubleAveraging
from thinwire.methods.strategies.gossip.exact_diffusion import ExactDiffusion
from thinwire.methods.strategies.gossip.quasi_global import QuasiGlobal

DOUBLE = torch.float64
STEPS, BRIEF = 40, 12
WARMING = [0.02 * min(step + 1, 5) * (0.3 if step > 25 else 1) for step in range(STEPS)]
LR = 0.4
TOLERANCE = {torch.float32: 3e-5, DOUBLE: 1e-11}

Oracle = Callable[..., Tensor]
Case = tuple[Strategy, Oracle]
OWN = (DecentLaM, QuasiGlobal, DoubleAveraging, ExactDiffusion)


def cases(n: int, dtype: torch.dtype) -> list[Case]:
    """Every method beside its oracle, on static and on changing graphs."""
    ring, complete, one_peer = (make(n, dtype) for make in (oracles.ring, oracles.complete, oracles.one_peer))
    lam, quasi = oracles_gossip.decentlam, oracles_gossip.quasi_global
    double, exact = oracles_gossip.double_averaging, oracles_gossip.exact_diffusion
    return [
        (DecentLaM(), partial(lam, mixing=ring, momentum=0.9)),
        (DecentLaM(nesterov=True), partial(lam, mixing=ring, momentum=0.9, nesterov=True)),
        (DecentLaM(OnePeerExponential(), 0.4), partial(lam, mixing=one_peer, momentum=0.4)),
        (DecentLaM(Breathing(), 0.5), partial(lam, mixing=oracles.breathing(n, dtype), momentum=0.5)),
        (QuasiGlobal(), partial(quasi, mixing=one_peer, momentum=0.9)),
        (QuasiGlobal(Ring(), nesterov=True), partial(quasi, mixing=ring, momentum=0.9, nesterov=True)),
        (QuasiGlobal(Ring(), 0.8, memory=0.3), partial(quasi, mixing=ring, momentum=0.8, memory=0.3)),
        (DoubleAveraging(), partial(double, mixing=ring, momentum=0.9)),
        (DoubleAveraging(OnePeerExponential(), 0.8), partial(double, mixing=one_peer, momentum=0.8)),
        (ExactDiffusion(), partial(exact, mixing=ring, momentum=0.9)),
        (ExactDiffusion(Complete(), 0.0), partial(exact, mixing=complete, momentum=0.0)),
        (ExactDiffusion(OnePeerExponential(), 0.5), partial(exact, mixing=one_peer, momentum=0.5)),
    ]


def expected(problem: Problem, oracle: Oracle, n: int, rates: list[Any], **settings: Any) -> Tensor:
    return oracle(problem.gradient, problem.start.expand(n, -1), rates, **settings)


# -- oracles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [1, 2, 3, 4, 5, 8]))
@pytest.mark.slow
def test_every_method_equals_its_oracle_in_double_precision(n: int) -> None:
    rates = WARMING if n == 4 else WARMING[:12]
    problem = Regression(n, len(rates), DOUBLE)
    for strategy, oracle in cases(n, DOUBLE):
        real = together(n, strategy, problem, rates, weight_decay=0.01)
        assert distance(real, expected(problem, oracle, n, rates, decay=0.01)) < TOLERANCE[DOUBLE], strategy


@pytest.mark.slow  # tests/battery asks it of each class
def test_every_method_equals_its_oracle_in_single_precision() -> None:
    problem = Regression(4, STEPS, torch.float32)
    for strategy, oracle in cases(4, torch.float32):
        real = together(4, strategy, problem, WARMING)
        assert distance(real, expected(problem, oracle, 4, WARMING)) < TOLERANCE[torch.float32], strategy


def test_every_method_equals_its_oracle_where_workers_disagree_most() -> None:
    problem, rates = quadratic(3, DOUBLE), WARMING[20:35]
    for strategy, oracle in cases(3, DOUBLE):
        real = together(3, strategy, problem, rates)
        assert distance(real, expected(problem, oracle, 3, rates)) < TOLERANCE[DOUBLE], strategy


def test_parameter_groups_have_learning_rates_of_their_own() -> None:
    problem = quadratic(3, DOUBLE)
    rates = [rate * torch.tensor([1.0, 0.25, 0.25], dtype=DOUBLE) for rate in WARMING[:8]]
    for strategy, oracle in cases(3, DOUBLE):
        real = together(3, strategy, problem, WARMING[:8], factors=(1.0, 0.25))
        assert distance(real, expected(problem, oracle, 3, rates)) < TOLERANCE[DOUBLE], strategy


def ends(comm: Comm, dtype: torch.dtype) -> list[list[float]]:
    """The final parameters of every method on this rank."""
    problem = Regression(comm.size, BRIEF, dtype)
    return [flat(train(comm, each, problem, WARMING[:BRIEF]).model).tolist() for each, _ in cases(comm.size, dtype)]


def rest_of_all(comm: Comm) -> list[list[float]]:
    """The fixed point of every method on this rank."""
    problem = quadratic(comm.size, DOUBLE)
    return [
        flat(train(comm, strategy, problem, [LR] * count, momentum=own).model).tolist()
        for strategy, own, _, count in spoken()
    ]


def spoken() -> list[Any]:
    """The methods whose fixed points are also checked on processes."""
    return [case for case in resting(4) if isinstance(case[0], DecentLaM | ExactDiffusion)][::2]


def train_all() -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
    """On five processes, five workers and then four of them."""
    group = dist.new_group([0, 1, 2, 3])
    five = ends(thinwire.GroupComm(), DOUBLE)
    if dist.get_rank() == 4:
        return five, [], []
    comm = thinwire.GroupComm(group)
    return five, ends(comm, torch.float32), rest_of_all(comm)


@pytest.mark.slow
def test_every_method_equals_its_oracle_and_its_fixed_point_on_processes() -> None:
    rows = run_processes(5, train_all)
    compare([five for five, _, _ in rows], 5, DOUBLE)
    compare([four for _, four, _ in rows[:4]], 4, torch.float32)
    at_rest = torch.tensor([row for _, _, row in rows[:4]], dtype=DOUBLE)
    for i, (strategy, _, wanted, _) in enumerate(spoken()):
        assert distance(at_rest[:, i], wanted) < 1e-9, strategy


def compare(rows: list[list[list[float]]], n: int, dtype: torch.dtype) -> None:
    """Compare the processes' final parameters, by rank and method, with the oracles."""
    real, problem = torch.tensor(rows, dtype=dtype), Regression(n, BRIEF, dtype)
    for i, (strategy, oracle) in enumerate(cases(n, dtype)):
        assert distance(real[:, i], expected(problem, oracle, n, WARMING[:BRIEF])) < TOLERANCE[dtype], strategy


# -- fixed points ------------------------------------------------------------------------------------------------------


def resting(n: int, momentum: float = 0.6) -> list[tuple[Strategy, float, Tensor, int]]:
    """Every method on a ring, the momentum of the optimizer, the fixed point, and the steps to get there."""
    problem, w, eye = quadratic(n, DOUBLE), oracles.ring(n, DOUBLE)(0), torch.eye(n, dtype=DOUBLE)
    at_rest = partial(oracles_gossip.at_rest, w, problem.curvature, problem.centre)
    plain, long = at_rest(LR * w), LR / (1 - momentum)
    ahead = at_rest((1 + momentum) * LR * w)
    optimum = (problem.curvature[:, None] * problem.centre).sum(0) / problem.curvature.sum()
    return [
        (Gossip(order="after"), 0.0, plain, 135),
        (DecentLaM(momentum=momentum), 0.0, plain, 135),
        (DecentLaM(momentum=momentum, nesterov=True), 0.0, plain, 135),
        (QuasiGlobal(Ring(), momentum), 0.0, plain, 135),
        (QuasiGlobal(Ring(), momentum, nesterov=True, memory=0.3), 0.0, ahead, 135),
        (Gossip(order="after"), momentum, at_rest(long * w), 135),
        (Gossip(), momentum, at_rest(long * eye), 135),
        (Gossip(), 0.0, at_rest(LR * eye), 135),
        (DoubleAveraging(Ring(), momentum), 0.0, at_rest(LR * w @ torch.linalg.inv(eye - momentum * w)), 135),
        (ExactDiffusion(Ring(), momentum), 0.0, optimum.expand(n, -1), 150),
        (AllReduce(), momentum, optimum.expand(n, -1), 135),
    ]


@pytest.mark.slow
def test_methods_converge_to_the_fixed_points_of_their_equations() -> None:
    problem = quadratic(5, DOUBLE)
    for strategy, own, wanted, count in resting(5):
        real = together(5, strategy, problem, [LR] * count, momentum=own)
        assert distance(real, wanted) < 1e-9, strategy


@pytest.mark.slow
def test_with_momentum_in_the_optimizer_the_fixed_point_is_that_of_gossip_at_a_larger_rate() -> None:
    problem = quadratic(4, DOUBLE)
    heavy = together(4, Gossip(order="after"), problem, [0.02] * 400, momentum=0.8)
    assert distance(heavy, together(4, Gossip(order="after"), problem, [0.1] * 500)) < 1e-9
    assert distance(heavy, together(4, Gossip(order="after"), problem, [0.02] * 500)) > 1e-2


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_at_equal_curvature_each_mode_of_the_optima_leaves_its_share(momentum: float) -> None:
    n, curvature, lr = 8, 1.3, 0.05
    w, eye = oracles.ring(n, DOUBLE)(0), torch.eye(n, dtype=DOUBLE)
    centre = torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    values, modes = torch.linalg.eigh(w)
    pulls = {
        "displacement": lr * w,
        "after": lr / (1 - momentum) * w,
        "while": lr / (1 - momentum) * eye,
        "double": lr * w @ torch.linalg.inv(eye - momentum * w),
    }
    for method, pull in pulls.items():
        at_rest = oracles_gossip.at_rest(w, torch.full((n,), curvature, dtype=DOUBLE), centre, pull)
        left = (modes.T @ (at_rest - centre.mean(0)))[values < 1 - 1e-9] / (modes.T @ centre)[values < 1 - 1e-9]
        share = oracles_gossip.bias_of_modes(values[values < 1 - 1e-9], lr * curvature, method, momentum)
        assert torch.allclose(left, share[:, None].expand_as(left), rtol=0, atol=1e-11), method
        assert torch.allclose(at_rest.mean(0), centre.mean(0), rtol=0, atol=1e-11)


def test_momentum_on_gradients_multiplies_the_bias_and_decentlam_does_not() -> None:
    values = torch.linalg.eigvalsh(oracles.ring(8, DOUBLE)(0))[:-1]

    def squared(method: str, lr: float) -> float:
        return float(oracles_gossip.bias_of_modes(values, lr, method, 0.9).square().sum())

    ratios = [squared("after", lr) / squared("displacement", lr) for lr in (2e-4, 2e-6)]
    assert 95 < ratios[0] < 100
    assert abs(ratios[1] - 100) < 0.1


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [Ring(), OnePeerExponential(), Breathing()])
@pytest.mark.slow
def test_without_momentum_they_are_gossip_bit_for_bit(graph: Any) -> None:
    problem = Regression(5, 12, torch.float32)
    gossip = together(5, Gossip(graph, "after"), problem, WARMING[:12])
    for kind in (DecentLaM, QuasiGlobal, DoubleAveraging):
        assert torch.equal(together(5, kind(graph, 0.0), problem, WARMING[:12]), gossip), kind
    assert torch.equal(together(5, DecentLaM(graph, 0.0, True), problem, WARMING[:12]), gossip)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.slow
def test_on_the_complete_graph_they_are_all_reduce_with_momentum(momentum: float) -> None:
    problem, rates = Regression(3, 20, DOUBLE), WARMING[:20]
    parallel = watched(3, AllReduce(), problem, rates, momentum=momentum)
    for strategy in (DecentLaM(Complete(), momentum), DoubleAveraging(Complete(), momentum)):
        assert distance(watched(3, strategy, problem, rates), parallel) < 1e-13, strategy
    nesterov = watched(3, AllReduce(), problem, rates, momentum=momentum, nesterov=True)
    assert distance(watched(3, DecentLaM(Complete(), momentum, True), problem, rates), nesterov) < 1e-13
    local = watched(3, Gossip(Complete(), "after"), problem, rates, momentum=momentum)
    assert distance(local, parallel) < 1e-13
    assert distance(watched(3, Gossip(Complete()), problem, rates, momentum=momentum), parallel) > 1e-3


def test_decentlam_is_heavy_ball_on_the_displacement_of_gossip() -> None:
    problem = quadratic(5, DOUBLE)
    ball = oracles_gossip.heavy_ball_of_displacements(
        problem.gradient, problem.start.expand(5, -1), WARMING, mixing=oracles.ring(5, DOUBLE), momentum=0.9
    )
    assert distance(together(5, DecentLaM(), problem, WARMING), ball) < 1e-12


@pytest.mark.parametrize("graph", [Ring(), Breathing()])
@pytest.mark.slow
def test_the_mean_of_all_workers_follows_heavy_ball_on_the_mean_of_their_gradients(graph: Any) -> None:
    problem, rates = quadratic(4, DOUBLE), WARMING
    methods: list[tuple[Strategy, float, float]] = [
        (DecentLaM(graph, 0.4), 0.0, 1.0),
        (DoubleAveraging(graph, 0.4), 0.0, 1.0),
        (ExactDiffusion(graph, 0.4), 0.0, 0.6),
        (Gossip(graph, "after"), 0.4, 1.0),
    ]
    for strategy, own, share in methods:
        seen = watched(4, strategy, problem, rates, momentum=own)
        places = torch.cat([problem.start.expand(1, 4, -1), seen])
        mean, m = problem.start, torch.zeros(3, dtype=DOUBLE)
        for k, rate in enumerate(rates):
            m = 0.4 * m + share * problem.gradient(places[k], k).mean(0)
            mean = mean - rate * m
        assert torch.allclose(seen[-1].mean(0), mean, rtol=0, atol=1e-13), strategy


def test_where_all_workers_have_the_same_data_they_train_as_one() -> None:
    alike = Quadratic(torch.full((4,), 0.7, dtype=DOUBLE), torch.ones(4, 3, dtype=DOUBLE).cumsum(1))
    single = Descent([0.1] * 20, momentum=0.9)
    one = oracles.all_reduce(alike.gradient, alike.start.expand(4, -1), single, 20)
    for strategy, own in ((DecentLaM(), 0.0), (DoubleAveraging(), 0.0), (Gossip(order="after"), 0.9)):
        assert distance(together(4, strategy, alike, [0.1] * 20, momentum=own), one) < 1e-13, strategy


def test_one_worker_trains_as_torch_does_and_sends_nothing() -> None:
    problem = Regression(1, 20, DOUBLE)
    for strategy in (DecentLaM(), DoubleAveraging()):
        worker = train(None, strategy, problem, WARMING[:20])
        torch_own = train(None, AllReduce(), problem, WARMING[:20], momentum=0.9)
        assert distance(flat(worker.model), flat(torch_own.model)) < 1e-13
        assert worker.comm.meter.messages == 0


@pytest.mark.slow  # each method equals its oracle on the ring
def test_turning_the_ring_turns_the_result() -> None:
    problem = quadratic(5, DOUBLE)
    turned = Quadratic(problem.curvature.roll(2), problem.centre.roll(2, 0))
    for strategy in (DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()):
        straight = together(5, strategy, problem, [0.1] * 15)
        assert distance(together(5, strategy, turned, [0.1] * 15), straight.roll(2, 0)) < 1e-12, strategy


def test_corrections_sum_to_zero_also_between_exact_averages() -> None:
    problem = quadratic(4, DOUBLE)
    seen = watched(4, SlowMo(ExactDiffusion(momentum=0.5), period=5, momentum=0.0), problem, [0.2] * 150, both)
    x, corrections = seen.chunk(2, dim=-1)
    assert torch.allclose(corrections.sum(1), torch.zeros(3, dtype=DOUBLE), rtol=0, atol=1e-13)
    assert corrections[-1].abs().max() > 1e-2
    optimum = (problem.curvature[:, None] * problem.centre).sum(0) / problem.curvature.sum()
    assert distance(x[-1], optimum.expand(4, -1)) < 1e-8


def both(r: Replica) -> Tensor:
    return torch.cat([r.x, r.part("base").state["correction"]])


# -- learning rates ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [DecentLaM(), QuasiGlobal(Ring()), DoubleAveraging(), ExactDiffusion()], ids=str)
def test_at_a_learning_rate_of_zero_parameters_are_mixed_and_momentum_decays(strategy: Strategy) -> None:
    rates = [0.1] * 5 + [0.0] + [0.1] * 5

    def see(r: Replica) -> Tensor:
        return torch.cat([r.x, r.state["momentum"]])

    x, momentum = watched(4, strategy, quadratic(4, DOUBLE), rates, see).chunk(2, dim=-1)
    mix = oracles.ring(4, DOUBLE)(0)
    assert x.isfinite().all()
    assert torch.allclose(x[5].mean(0), x[4].mean(0), rtol=0, atol=1e-14)
    assert distance(momentum[5].mean(0), 0.9 * momentum[4].mean(0)) < 1e-12
    if not isinstance(strategy, ExactDiffusion):
        assert torch.allclose(x[5], mix @ x[4], rtol=0, atol=1e-14)
    assert distance(x[10], x[5]) > 1e-3


@pytest.mark.parametrize("strategy", [DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()], ids=str)
def test_parameters_that_never_have_a_learning_rate_stay_where_they_are(strategy: Strategy) -> None:
    real = together(3, strategy, quadratic(3, DOUBLE), [0.1] * 6, factors=(1.0, 0.0))
    assert torch.allclose(real[:, 1:], torch.ones(3, 2, dtype=DOUBLE), rtol=0, atol=1e-14)
    assert distance(real[:, :1], torch.ones(3, 1, dtype=DOUBLE)) > 1e-2


@pytest.mark.slow
def test_a_hundred_and_twenty_eight_workers_agree_with_the_oracle() -> None:
    problem = quadratic(128, DOUBLE)
    mixings: list[tuple[Strategy, Oracle, Mixing]] = [
        (DecentLaM(), partial(oracles_gossip.decentlam, momentum=0.9), oracles.ring(128, DOUBLE)),
        (QuasiGlobal(), partial(oracles_gossip.quasi_global, momentum=0.9), oracles.one_peer(128, DOUBLE)),
    ]
    for strategy, oracle, mixing in mixings:
        strategy.check(128)  # kept by the threads' own checks
        real = together(128, strategy, problem, [0.1] * 2)
        assert distance(real, expected(problem, oracle, 128, [0.1] * 2, mixing=mixing)) < 1e-12, strategy
