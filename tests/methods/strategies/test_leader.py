# SPDX-License-Identifier: Apache-2.0
"""LSGD and LGD equal their papers, and what holds of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.leader_runs import DoubleWell, begin, go_on, losses_of, together, train
from tests.oracles.common import Descent
from tests.oracles.leader import lgd, lsgd, starts_of
from tests.pool import run_processes
from tests.problems import Regression, distance, flat
from thinwire import Comm, Local, run_threads
from thinwire.methods.strategies.leader.election import (
    chain_broadcast_,
    chain_from,
    two_level_broadcast_,
)
from thinwire.methods.strategies.leader.leader import LeaderSGD
from thinwire.methods.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.methods.strategies.leader.multi_leader import MultiLeaderSGD

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
INF = math.inf

# -- the papers' algorithms --------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "every step": {"period": 1, "pull": 0.3},
    "periodic": {"period": 4, "pull": 0.25},
    "nodes": {"period": 2, "pull": 0.2, "node_size": 2, "global_period": 6, "global_pull": 0.4},
}


def leaders(words: dict[str, Any]) -> thinwire.Strategy:
    return (MultiLeaderSGD if "node_size" in words else LeaderSGD)(**words)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 4, [2, 4, 6]))
@pytest.mark.parametrize("form", list(FORMS))
def test_leader_sgd_equals_its_oracle(form: str, n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    found = together(n, leaders(FORMS[form]), problem, RATES, starts=starts, **MOMENTUM)
    led: list[int] = []
    expected = lsgd(
        problem.gradient, losses_of(problem), starts, Descent(RATES, **MOMENTUM), STEPS, led=led, **FORMS[form]
    )
    assert distance(found, expected) < 1e-12
    assert len(set(led)) > 1 or n == 2


@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [2, 3, 5]))
def test_leader_gradient_descent_equals_its_oracle(n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    found = together(n, LeaderGradientDescent(pull=0.7), problem, RATES, starts=starts)
    assert distance(found, lgd(problem.gradient, losses_of(problem), starts, 0.1, STEPS, pull=0.7)) < 1e-12


def everything_on_processes(n: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    recipes = {form: leaders(words) for form, words in FORMS.items()}
    found: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    for name, recipe in {**recipes, "gradient": LeaderGradientDescent(pull=0.7)}.items():
        worker = begin(None, recipe, problem, starts)
        before = worker.comm.meter.payload_bytes
        go_on(worker, problem, RATES)
        sent[name] = worker.comm.meter.payload_bytes - before
        worker.detach()
        found[name] = flat(worker.model).tolist()
    return found, sent


# The battery has every strategy on two processes.
@pytest.mark.slow
def test_on_processes_as_on_threads() -> None:
    rows = run_processes(4, everything_on_processes, 4)
    problem, starts = Regression(4, STEPS, DOUBLE), starts_of(4)
    losses = losses_of(problem)
    expected = {
        form: lsgd(problem.gradient, losses, starts, Descent(RATES), STEPS, **words) for form, words in FORMS.items()
    }
    expected["gradient"] = lgd(problem.gradient, losses, starts, 0.1, STEPS, pull=0.7)
    for name, each in expected.items():
        assert distance(torch.tensor([found[name] for found, _ in rows], dtype=DOUBLE), each) < 1e-12, name
    size = 34 * 8
    assert sum(sent["periodic"] for _, sent in rows) == STEPS / 4 * (3 * size + 4 * 8)


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [LeaderSGD(period=3, pull=0), MultiLeaderSGD(3, 0.0, 3, 3, 0.0), LeaderGradientDescent(pull=0)],
    ids=repr,
)
def test_without_a_pull_workers_train_by_themselves_and_send_nothing(strategy: thinwire.Strategy) -> None:
    problem, starts = Regression(3, STEPS, torch.float32), starts_of(3).float()

    def body(comm: Comm) -> tuple[Tensor, float]:
        worker = begin(comm, strategy, problem, starts, **MOMENTUM)
        before = comm.meter.payload_bytes
        go_on(worker, problem, RATES)
        return flat(worker.model), comm.meter.payload_bytes - before

    apart = together(3, Local(), problem, RATES, starts=starts, **MOMENTUM)
    for rank, (x, sent) in enumerate(run_threads(3, body)):
        assert torch.equal(x, apart[rank])
        assert sent == 0


def test_a_full_pull_at_every_step_makes_all_workers_the_best_one() -> None:
    found = together(
        4, LeaderSGD(period=1, pull=1.0), Regression(4, 9, torch.float32), RATES[:9], starts=starts_of(4).float()
    )
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize(
    "strategy", [LeaderSGD(period=2), MultiLeaderSGD(period=2, node_size=1), LeaderGradientDescent()], ids=repr
)
def test_one_worker_alone_is_the_plain_optimizer(strategy: thinwire.Strategy) -> None:
    problem = Regression(1, STEPS, DOUBLE)
    worker = train(None, strategy, problem, RATES, **MOMENTUM)
    assert worker.comm.meter.payload_bytes == 0
    assert torch.equal(flat(worker.model), flat(train(None, Local(), problem, RATES, **MOMENTUM).model))
    with worker.consensus() as model:
        assert torch.equal(flat(model), flat(worker.model))


def test_nodes_that_elect_with_all_others_are_one_leader_for_all() -> None:
    problem, starts = Regression(4, STEPS, DOUBLE), starts_of(4)
    single = together(4, LeaderSGD(period=3, pull=0.3), problem, RATES, starts=starts)
    nodes = MultiLeaderSGD(period=3, pull=0.0, node_size=2, global_period=3, global_pull=0.3)
    assert torch.equal(together(4, nodes, problem, RATES, starts=starts), single)
    whole = MultiLeaderSGD(period=3, pull=0.3, node_size=4, global_period=3, global_pull=0.0)
    assert torch.equal(together(4, whole, problem, RATES, starts=starts), single)


def test_ranks_may_change_places() -> None:
    order = [2, 0, 3, 1]
    starts, well = starts_of(4, 3), DoubleWell(0.1, 3)
    strategy = LeaderSGD(period=2, pull=0.2)
    found = together(4, strategy, well, RATES, starts=starts)
    assert torch.equal(together(4, strategy, well, RATES, starts=starts[order]), found[order])


def test_the_best_of_all_is_where_its_own_step_took_it() -> None:
    well, starts = DoubleWell(0.3, 3), starts_of(4, 3)

    def body(comm: Comm) -> tuple[Tensor, float]:
        worker = begin(comm, MultiLeaderSGD(period=1, pull=0.5, node_size=2, global_period=1), well, starts)
        go_on(worker, well, [0.1])
        return flat(worker.model), worker.metrics()["leader"]

    (_, leader), *_ = rows = run_threads(4, body)
    place = int(leader)
    assert place == int(losses_of(well)(starts, 0).argmin())
    assert torch.equal(rows[place][0], starts[place] - 0.1 * well.gradient(starts[place], 0))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_two_level_broadcasts_equal_one_broadcast(n: int) -> None:
    width = 700_000  # several pieces

    def body(comm: Comm) -> bool:
        x = torch.randn(width, generator=torch.Generator().manual_seed(comm.rank))
        flat_, chained = x.clone(), x.clone()
        comm.broadcast_(flat_, n - 1).wait()
        chain_broadcast_(comm, chained, chain_from(n - 1, range(n)))
        staged = [two_level_broadcast_(comm, x.clone(), n - 1, size) for size in (1, 2, 3, n) if n % size == 0]
        return torch.equal(chained, flat_) and all(torch.equal(each, flat_) for each in staged)

    assert all(run_threads(n, body))


# -- landscapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pull", "crosses"), [(0.24, False), (0.26, True)])
@pytest.mark.slow
def test_a_follower_leaves_its_well_from_a_quarter_on(pull: float, crosses: bool) -> None:
    starts = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    # The wells are equally deep, so that rank 0 leads for ever.
    found = together(
        2, LeaderGradientDescent(pull=pull), DoubleWell(), [0.5] * (150 if crosses else 400), starts=starts
    )
    assert float(found[0]) == 1.0
    expected = 1.0 if crosses else -(1 + math.sqrt(1 - 4 * pull)) / 2
    assert float(found[1]) == pytest.approx(expected, abs=1e-9)


def test_common_stationary_points_are_left_alone() -> None:
    starts = torch.tensor([[1.0], [1.0], [1.0]], dtype=DOUBLE)
    for strategy in (LeaderGradientDescent(pull=0.5), LeaderSGD(period=1, pull=0.5)):
        assert torch.equal(together(3, strategy, DoubleWell(), [0.1] * 5, starts=starts), starts)


@pytest.mark.slow
def test_wherever_all_come_to_rest_the_leader_s_gradient_is_zero() -> None:
    well, starts = DoubleWell(0.05, 4), starts_of(4, 4, seed=3) * 3
    found = together(4, LeaderGradientDescent(pull=0.1), well, [0.25] * 400, starts=starts)
    leader = int(losses_of(well)(found, 0).argmin())
    assert well.gradient(found[leader], 0).abs().max() < 1e-9
    assert distance(lgd(well.gradient, losses_of(well), found, 0.25, 1, pull=0.1), found) < 1e-9


@pytest.mark.parametrize(("share", "kept"), [(2, 0.0), (4, 0.25)])
def test_one_step_descends_at_least_as_far_as_smoothness_says(share: int, kept: float) -> None:
    """With eta <= 1/(2L) and eta lambda <= 1/(share kappa): smoothness, and strong convexity between x and z."""
    draw = torch.Generator().manual_seed(share)
    worst = -INF
    for _ in range(1000):
        least, ratio, eta, pull = (float(u) for u in torch.rand(4, generator=draw, dtype=DOUBLE))
        least, ratio = 0.1 + least, 1 + 20 * ratio**4
        eta, pull = eta / (2 * least * ratio), pull / (share * ratio * eta / (2 * least * ratio))
        h = least * (1 + (ratio - 1) * torch.rand(4, generator=draw, dtype=DOUBLE))
        h[0], h[1] = least, least * ratio
        points = torch.randn(2, 4, generator=draw, dtype=DOUBLE)
        z, x = points[(h * points.square()).sum(1).argsort()]
        f_x, f_z = ((h * y.square()).sum() / 2 for y in (x, z))
        after = x - eta * (h * x + pull * (x - z))
        least_descent = eta * least * f_x + eta * pull * (f_x - f_z + kept * least * (x - z).square().sum())
        worst = max(worst, float((h * after.square()).sum() / 2 - (f_x - least_descent)))
        expected = lgd(
            lambda y, k, h=h: h * y, lambda y, k, h=h: (h * y.square()).sum(1) / 2, points, eta, 1, pull=pull
        )
        assert any(torch.allclose(row, after, rtol=1e-12, atol=0) for row in expected)
    assert -0.1 < worst < 1e-12
