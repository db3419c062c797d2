# SPDX-License-Identifier: Apache-2.0
"""LSGD and LGD in use: their bytes, saving, what is shipped and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.leader_runs import DoubleWell, begin, go_on, losses_of
from tests.oracles.leader import starts_of
from tests.problems import Regression, flat, quadratic
from thinwire import Comm, ConfigError, run_threads
from thinwire.methods.strategies.leader.leader import LeaderSGD
from thinwire.methods.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.methods.strategies.leader.multi_leader import MultiLeaderSGD
from thinwire.planning.plan.traffic import DryRun

DOUBLE = torch.float64
RATES = [0.1] * 24
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
NAN = math.nan


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_round_carries_half_of_what_an_average_carries(n: int) -> None:
    elements = 840

    def sent(strategy: thinwire.Strategy) -> float:
        run = DryRun(strategy, [elements], workers=n, rank=0, dtype=torch.float32, bucket_bytes=1)
        return sum(run.step().sent for _ in range(16))

    assert sent(LeaderSGD(period=8)) == 2 * ((n - 1) / n * 4 * elements + 8)
    assert sent(LeaderSGD(period=8)) - 2 * 8 == sent(thinwire.LocalSGD(period=8)) / 2
    assert sent(LeaderGradientDescent()) == 16 * ((n - 1) / n * 4 * elements + 8)


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


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        LeaderSGD(period=4, pull=0.2),
        LeaderSGD(period=4, metric="ema"),
        MultiLeaderSGD(period=2, node_size=2, global_period=4),
        LeaderGradientDescent(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("first", fast_where(lambda first: first == 5, [3, 5, 6]))
def test_a_run_resumed_in_the_middle_of_a_round_is_the_uninterrupted_one(
    strategy: thinwire.Strategy, first: int
) -> None:
    problem, starts = Regression(4, 13, torch.float32), starts_of(4).float()

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = go_on(begin(comm, strategy, problem, starts, **MOMENTUM), problem, RATES[:first])
        saved = worker.state_dict(model=True, optimizer=True)
        go_on(worker, problem, RATES[first:13], first)
        again = begin(comm, strategy, problem, starts, **MOMENTUM)
        again.load_state_dict(saved)
        go_on(again, problem, RATES[first:13], first)
        return flat(worker.model), flat(again.model)

    for through, resumed in run_threads(4, body, timeout=20):
        assert torch.equal(through, resumed)


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


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"pull": 1.5}, r"pull=1.5: must lie in \[0, 1\]"),
        ({"pull": -0.1}, "pull=-0.1"),
        ({"pull": NAN}, "pull=nan"),
        ({"period": 0}, "period=0: must be at least 1"),
        ({"metric": "median"}, "metric"),
        ({"result": "centre"}, "result"),
    ],
)
def test_recipes_that_cannot_work_are_refused(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LeaderSGD(**words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"period": 0}, "period=0: must be at least 1"),
        ({"node_size": 0}, "node_size=0"),
        ({"global_period": 0}, "must be a multiple"),
        ({"global_period": 17}, "must be a multiple of period=16, such as 64"),
        ({"pull": -0.5}, "pull=-0.5"),
        ({"global_pull": 3.0}, "global_pull=3.0"),
    ],
)
def test_leaders_of_nodes_that_cannot_work_are_refused(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MultiLeaderSGD(**words)


def test_workers_that_do_not_fill_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="node_size=2 with 3 workers"):
        MultiLeaderSGD(node_size=2).check(3)


def test_leader_gradient_descent_refuses_a_negative_pull() -> None:
    with pytest.raises(ConfigError, match="pull=-1"):
        LeaderGradientDescent(pull=-1.0)
