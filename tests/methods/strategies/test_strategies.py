# SPDX-License-Identifier: Apache-2.0
"""Averaging, gossip, push-sum and slow momentum over long runs: oracles, on many graphs, and on real processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import thinwire
from tests.oracles import common as oracles
from tests.oracles.common import Descent
from tests.pool import run_processes
from tests.problems import Breathing, Irregular, Problem, Regression, distance, flat, quadratic, together, train
from thinwire import (
    AllReduce,
    Comm,
    Complete,
    Gossip,
    Hypercube,
    Local,
    LocalSGD,
    OnePeerExponential,
    PushSum,
    SlowMo,
    Strategy,
)

SIZES = (1, 2, 3, 4, 5, 8)
STEPS = 50
ON_PROCESSES = 15  # two periods of the longest and a part of one
WARMING = [0.02 * min(step + 1, 5) for step in range(STEPS)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

Oracle = Callable[..., Tensor]
Case = tuple[Strategy, Oracle, dict[str, Any]]


def cases(n: int, dtype: torch.dtype) -> list[Case]:
    """Every strategy beside its oracle, and the settings of the workers' own SGD."""
    ring, complete, one_peer, cube, irregular = (
        make(n, dtype) for make in (oracles.ring, oracles.complete, oracles.one_peer, oracles.cube, oracles.irregular)
    )
    breathing = oracles.breathing(n, dtype)
    heavy, nesterov = {"momentum": 0.9, "weight_decay": 0.01}, {"momentum": 0.9, "nesterov": True}
    meanwhile, after = oracles.combine_while_adapting, oracles.adapt_then_combine
    slow = {"period": 6, "momentum": 0.5, "lr": 0.8}
    chosen: list[Case] = [
        (AllReduce(), oracles.all_reduce, heavy),
        (Local(), partial(oracles.local_sgd, period=STEPS + 1), heavy),
        (LocalSGD(period=7), partial(oracles.local_sgd, period=7), nesterov),
        (Gossip(), partial(meanwhile, mixing=ring), heavy),
        (Gossip(order="after"), partial(after, mixing=ring), heavy),
        (Gossip(Complete()), partial(meanwhile, mixing=complete), {}),
        (Gossip(Complete(), "after"), partial(after, mixing=complete), nesterov),
        (Gossip(OnePeerExponential()), partial(meanwhile, mixing=one_peer), nesterov),
        (Gossip(OnePeerExponential(), "after"), partial(after, mixing=one_peer), {}),
        (Gossip(Breathing()), partial(meanwhile, mixing=breathing), heavy),
        (Gossip(Breathing(), "after"), partial(after, mixing=breathing), {}),
        (PushSum(), partial(oracles.push_sum, mixing=one_peer), heavy),
        (PushSum(Irregular()), partial(oracles.push_sum, mixing=irregular), nesterov),
        (PushSum(Irregular()), partial(oracles.push_sum, mixing=irregular), {"weight_decay": 0.1}),
        (SlowMo(**slow), partial(oracles.slow_momentum, **slow), nesterov),
        (SlowMo(PushSum(), **slow), partial(oracles.slow_momentum, **slow, mixing=one_peer), heavy),
        (SlowMo(PushSum(Irregular()), **slow), partial(oracles.slow_momentum, **slow, mixing=irregular), heavy),
        (SlowMo(Gossip(), **slow), partial(oracles.slow_momentum, **slow, mixing=ring, meanwhile=True), heavy),
    ]
    if n & (n - 1) == 0:
        chosen.append((Gossip(Hypercube()), partial(meanwhile, mixing=cube), heavy))
    return chosen


def expected(problem: Problem, oracle: Oracle, n: int, rates: list[float], settings: dict[str, Any]) -> Tensor:
    renamed = {"weight_decay": "decay"}
    descend = Descent(rates, **{renamed.get(name, name): value for name, value in settings.items()})
    return oracle(problem.gradient, problem.start.expand(n, -1), descend, len(rates))


# Always asked is each where workers disagree most, and in tests/battery its plain form on this problem.
@pytest.mark.slow
@pytest.mark.parametrize("n", SIZES)
def test_every_strategy_equals_its_oracle_in_double_precision(n: int) -> None:
    rates = WARMING if n == 4 else WARMING[:16] if n == 3 else WARMING[:26]
    problem = Regression(n, len(rates), torch.float64)
    for strategy, oracle, settings in cases(n, torch.float64):
        real = together(n, strategy, problem, rates, **settings)
        assert distance(real, expected(problem, oracle, n, rates, settings)) < TOLERANCE[torch.float64], strategy


@pytest.mark.slow
def test_every_strategy_equals_its_oracle_in_single_precision() -> None:
    problem = Regression(4, STEPS, torch.float32)
    for strategy, oracle, settings in cases(4, torch.float32):
        real = together(4, strategy, problem, WARMING, **settings)
        assert distance(real, expected(problem, oracle, 4, WARMING, settings)) < TOLERANCE[torch.float32], strategy


@pytest.mark.parametrize("n", [3])
@pytest.mark.slow
def test_every_strategy_equals_its_oracle_where_workers_disagree_most(n: int) -> None:
    problem = quadratic(n, torch.float64)
    for strategy, oracle, settings in cases(n, torch.float64):
        real = together(n, strategy, problem, WARMING[:12], **settings)
        assert distance(real, expected(problem, oracle, n, WARMING[:12], settings)) < TOLERANCE[torch.float64], strategy


def spoken(n: int, dtype: torch.dtype) -> list[Case]:
    """Every strategy, on the graphs that differ most; with five workers (no power of two) those that gossip."""
    left_out = ("Complete", "Hypercube", "Breathing")
    chosen = [case for case in cases(n, dtype) if not any(graph in repr(case[0]) for graph in left_out)]
    return [case for case in chosen if n == 4 or isinstance(case[0], Gossip | PushSum)]


def ends(comm: Comm, dtype: torch.dtype) -> list[list[float]]:
    """The final parameters of every strategy on this rank."""
    problem = Regression(comm.size, ON_PROCESSES, dtype)
    return [
        flat(train(comm, strategy, problem, WARMING[:ON_PROCESSES], **settings).model).tolist()
        for strategy, _, settings in spoken(comm.size, dtype)
    ]


def slow_vectors(comm: Comm) -> list[float]:
    """This rank's parameters after a slow step."""
    strategy = SlowMo(PushSum(Irregular()), period=6)
    (r,) = train(comm, strategy, Regression(comm.size, 12, torch.float32), [0.1] * 12, momentum=0.9).replicas
    return torch.cat([r.x, r.state["anchor"], r.state["slow"]]).tolist()


def train_all() -> tuple[list[list[float]], list[list[list[float]]], list[float]]:
    """On five processes, five workers and then four of them."""
    group = dist.new_group([0, 1, 2, 3])
    five = ends(thinwire.GroupComm(), torch.float64)
    if dist.get_rank() == 4:
        return five, [], []
    comm = thinwire.GroupComm(group)
    return five, [ends(comm, torch.float32), ends(comm, torch.float64)], slow_vectors(comm)


@pytest.mark.slow  # threads are asked always, and tests/battery/test_processes.py has the strategy on processes
def test_every_strategy_equals_its_oracle_on_processes() -> None:
    rows = run_processes(5, train_all)
    compare([five for five, _, _ in rows], 5, torch.float64)
    compare([single for _, (single, _), _ in rows[:4]], 4, torch.float32)
    compare([double for _, (_, double), _ in rows[:4]], 4, torch.float64)
    assert all(bits == rows[0][2] for _, _, bits in rows[:4])


def compare(rows: list[list[list[float]]], n: int, dtype: torch.dtype) -> None:
    """Compare the processes' final parameters, by rank and strategy, with the oracles."""
    problem = Regression(n, ON_PROCESSES, dtype)
    real = torch.tensor(rows, dtype=dtype)
    for i, (strategy, oracle, settings) in enumerate(spoken(n, dtype)):
        wanted = expected(problem, oracle, n, WARMING[:ON_PROCESSES], settings)
        assert distance(real[:, i], wanted) < TOLERANCE[dtype], strategy


@pytest.mark.parametrize(
    "recipe",
    [
        "AllReduce()",
        "AllReduce(codec=Fp16())",
        'BackupWorkers(reduction="messages")',
        'BackupWorkers(reduction="all_reduce")',
        "NodeAverage(LocalSGD(4), period=1, node_size=3)",
    ],
)
def test_sums_in_fp16_do_not_overflow_where_the_mean_is_finite(recipe: str) -> None:
    def train(comm: Comm) -> list[float]:
        model = nn.Linear(1, 3, bias=False).half()
        nn.init.constant_(model.weight, 30000.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        worker = thinwire.attach(model, optimizer, recipe, comm=comm)
        scale = torch.tensor([40000.0, -30000.0, 1.0], dtype=torch.float16)
        while worker.step < 1:
            optimizer.zero_grad()
            (model(torch.ones(1, 1, dtype=torch.float16)) * scale).backward(torch.ones(1, 3, dtype=torch.float16))
            optimizer.step()
        worker.detach()
        return model.weight.flatten().tolist()

    wanted = torch.tensor([10000.0, 45000.0, 30000.0], dtype=torch.float16).tolist()
    for found in thinwire.run_threads(3, train, timeout=20):
        assert found == pytest.approx(wanted, rel=2e-3)
