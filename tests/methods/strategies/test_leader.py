# SPDX-License-Identifier: Apache-2.0
"""LSGD and LGD: their oracles and identities, bytes, what is shipped and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.leader_runs import DoubleWell, losses_of, starts_of
from tests.oracles.common import Descent
from tests.oracles.machines import Leader, path
from tests.problems import Regression, begin, distance, flat, go_on, quadratic, together
from tests.rules import refusals
from thinwire import AsyncLeaderSGD, Comm, Local, run_threads
from thinwire.methods.strategies.leader.election import chain_broadcast_, chain_from, two_level_broadcast_
from thinwire.methods.strategies.leader.leader import LeaderSGD
from thinwire.methods.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.methods.strategies.leader.multi_leader import MultiLeaderSGD

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True}

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
    machine = Leader(**FORMS[form])
    expected = path(machine, problem.gradient, starts, Descent(RATES, **MOMENTUM), RATES, losses_of(problem))[-1]
    assert distance(found, expected) < 1e-12
    assert len(set(machine.led)) > 1 or n == 2


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


def test_nodes_that_elect_with_all_others_are_one_leader_for_all() -> None:
    problem, starts = Regression(4, STEPS, DOUBLE), starts_of(4)
    single = together(4, LeaderSGD(period=3, pull=0.3), problem, RATES, starts=starts)
    nodes = MultiLeaderSGD(period=3, pull=0.0, node_size=2, global_period=3, global_pull=0.3)
    assert torch.equal(together(4, nodes, problem, RATES, starts=starts), single)
    whole = MultiLeaderSGD(period=3, pull=0.3, node_size=4, global_period=3, global_pull=0.0)
    assert torch.equal(together(4, whole, problem, RATES, starts=starts), single)


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


# -- bytes -------------------------------------------------------------------------------------------------------------


def test_between_nodes_the_leader_goes_once_for_each_other_node() -> None:
    """Bytes that cross from one node to another, and those that do not."""
    problem, n, size = quadratic(6, DOUBLE, width=50), 6, 2
    crossed: list[tuple[int, int, int]] = []

    def body(comm: Comm) -> None:
        worker = begin(comm, MultiLeaderSGD(1, 0.1, node_size=size, global_period=2), problem, starts_of(n, 50))
        plain = comm._send_recv

        def watched(x: Tensor, dst: Any, src: Any) -> Any:
            crossed.extend((comm.step, comm.rank // size - j // size, x.numel()) for j in dst)
            return plain(x, dst, src)

        comm._send_recv = watched  # type: ignore[method-assign]
        go_on(worker, problem, [0.01] * 2)

    run_threads(n, body)
    vectors = [(step, node) for step, node, numel in crossed if numel == 50]
    assert sum(node != 0 for _, node in vectors) == 2  # three nodes, one global round
    assert (
        sum(node == 0 for _, node in vectors) == 3 + 3 + 3
    )  # two local rounds, and the second stage of the global one


# -- what is shipped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy", [LeaderSGD(period=4), LeaderSGD(period=4, result="mean"), LeaderGradientDescent()], ids=repr
)
def test_consensus_is_the_leader_or_the_mean(strategy: thinwire.Strategy) -> None:
    well, starts = DoubleWell(0.1, 3), starts_of(3, 3)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = begin(comm, strategy, well, starts)
        with worker.consensus() as model:
            untrained = flat(model)
        go_on(worker, well, [0.0] * 3)
        with worker.consensus() as model:
            return untrained, flat(model)

    best = starts[int(losses_of(well)(starts, 0).argmin())]
    for untrained, shipped in run_threads(3, body):
        assert torch.allclose(untrained, starts.mean(0), rtol=0, atol=1e-15)
        expected = starts.mean(0) if getattr(strategy, "result", "") == "mean" else best
        assert torch.allclose(shipped, expected, rtol=0, atol=1e-15)


# -- what is refused ---------------------------------------------------------------------------------------------------


test_recipes_that_cannot_work_are_refused = refusals(
    [
        (lambda: LeaderSGD(pull=1.5), r"pull=1.5: must lie in \[0, 1\]"),
        (lambda: LeaderSGD(pull=-0.1), "pull=-0.1"),
        (lambda: LeaderSGD(pull=math.nan), "pull=nan"),
        (lambda: LeaderSGD(period=0), "period=0: must be at least 1"),
        (lambda: LeaderSGD(metric="median"), "metric"),  # type: ignore[arg-type]
        (lambda: LeaderSGD(result="centre"), "result"),  # type: ignore[arg-type]
        (lambda: MultiLeaderSGD(period=0), "period=0: must be at least 1"),
        (lambda: MultiLeaderSGD(node_size=0), "node_size=0"),
        (lambda: MultiLeaderSGD(global_period=0), "must be a multiple"),
        (lambda: MultiLeaderSGD(global_period=17), "must be a multiple of period=16, such as 64"),
        (lambda: MultiLeaderSGD(pull=-0.5), "pull=-0.5"),
        (lambda: MultiLeaderSGD(global_pull=3.0), "global_pull=3.0"),
        (lambda: MultiLeaderSGD(node_size=2).check(3), "node_size=2 with 3 workers"),
        (lambda: LeaderGradientDescent(pull=-1.0), "pull=-1"),
        (lambda: AsyncLeaderSGD(period=0), "period=0"),
        (lambda: AsyncLeaderSGD(pull=1.1), r"pull=1.1: must lie in"),
    ]
)
