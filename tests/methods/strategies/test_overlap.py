# SPDX-License-Identifier: Apache-2.0
"""Methods that hide their messages: Overlap Local-SGD, CoCoD-SGD, and fragments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.oracles import overlap as oracles
from tests.oracles.common import Descent
from tests.problems import Regression, average_outside, distance, quadratic, together, watched
from tests.rules import refusals
from thinwire import (
    AllReduce,
    CoCoD,
    Comm,
    Gossip,
    LocalSGD,
    OverlapLocalSGD,
    PushSum,
    Replica,
    SlowMo,
    Strategy,
    Streaming,
)

DOUBLE = torch.float64
STEPS = 23
RATES = [0.02 * (k + 1) for k in range(5)] + [0.1] * (STEPS - 5)

Oracle = Callable[..., Tensor]
CASES: list[tuple[Strategy, Oracle, dict[str, Any]]] = [
    (OverlapLocalSGD(period=4), partial(oracles.overlap_local_sgd, period=4, pull=0.6, momentum=0.7), {}),
    (
        OverlapLocalSGD(period=5, pull=0.3, momentum=0.0),
        partial(oracles.overlap_local_sgd, period=5, pull=0.3, momentum=0.0),
        {"momentum": 0.9, "nesterov": True},
    ),
    (
        OverlapLocalSGD(period=6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        partial(oracles.overlap_local_sgd, period=6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        {"momentum": 0.9},
    ),
    (OverlapLocalSGD(period=1), partial(oracles.overlap_local_sgd, period=1, pull=0.6, momentum=0.7), {}),
    (CoCoD(period=4), partial(oracles.cocod, period=4), {"momentum": 0.9}),
    (CoCoD(period=1), partial(oracles.cocod, period=1), {}),
]


def expected(problem: Any, oracle: Oracle, n: int, settings: dict[str, Any]) -> Tensor:
    return oracle(problem.gradient, problem.start.expand(n, -1), Descent(RATES, **settings), STEPS)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [1, 3, 4]))
def test_every_method_that_overlaps_equals_its_oracle(n: int) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    for strategy, oracle, settings in CASES:
        assert (
            distance(together(n, strategy, problem, RATES, **settings), expected(problem, oracle, n, settings)) < 1e-12
        )


VARIANTS = [
    OverlapLocalSGD(period=2, pull=0.6, momentum=0.0),
    OverlapLocalSGD(period=2, pull=0.6, momentum=0.7),
    OverlapLocalSGD(period=2, pull=0.2, momentum=0.7),
    OverlapLocalSGD(period=3, pull=0.5, momentum=0.9, lr=0.4, nesterov=True),
    OverlapLocalSGD(period=4, pull=0.5, momentum=0.9, lr=0.4, nesterov=True, delay=1),
]


@pytest.mark.parametrize(
    ("pull", "momentum", "factor"), [(0.6, 0.7, 0.690), (0.5, 0.7, 0.769), (0.2, 0.7, 0.930), (0.6, 0.9, 0.870)]
)
def test_progress_is_the_share_of_the_learning_rate_that_counts(pull: float, momentum: float, factor: float) -> None:
    strategy = OverlapLocalSGD(period=4, pull=pull, momentum=momentum)
    assert strategy.progress == pytest.approx(factor, abs=6e-4)
    assert pace(strategy) == pytest.approx(strategy.progress, rel=1e-4)


def test_compensation_makes_up_for_the_pull() -> None:
    strategy = OverlapLocalSGD(period=4, compensate=True)
    assert pace(strategy) == pytest.approx(1, rel=1e-4)


def pace(strategy: OverlapLocalSGD) -> float:
    """How fast a steady gradient moves the workers, against plain SGD."""

    class Slope:
        start = torch.zeros(2, dtype=DOUBLE)
        model = quadratic(2, DOUBLE, width=2).model

        def loss(self, model: Any, rank: int, step: int) -> Tensor:
            return -model().sum()

        def gradient(self, x: Tensor, step: int) -> Tensor:
            return -torch.ones_like(x)

    rounds = 40
    count = rounds * strategy.period
    seen = watched(2, strategy, Slope(), [0.01] * count)
    late, later = seen[count // 2 - 1, 0, 0], seen[-1, 0, 0]
    return float((later - late) / (0.01 * count / 2))


@pytest.mark.parametrize("base", [OverlapLocalSGD(period=4), LocalSGD(4), SlowMo(period=4), CoCoD(period=4)], ids=str)
def test_one_fragment_is_the_base(base: Strategy) -> None:
    problem = Regression(3, STEPS, torch.float32)
    assert torch.equal(
        together(3, Streaming(base, fragments=1), problem, RATES, momentum=0.9),
        together(3, base, problem, RATES, momentum=0.9),
    )


def peaks(strategy: Strategy, count: int = 24, size: int = 6400) -> tuple[float, float]:
    """The largest message of any step, and all bytes."""
    card = thinwire_explain(strategy, size)
    return max(card), sum(card) / len(card) * count


def thinwire_explain(strategy: Strategy, size: int) -> list[float]:
    comm = thinwire.CountingComm(0, 4)
    x = torch.empty(size, device="meta")
    r = Replica(x, torch.empty(0, device="meta"), comm, lr=lambda: 0.1)
    strategy.start(r)
    sent: list[float] = []
    for _ in range(48):
        before = comm.meter.payload_bytes
        strategy.before_step(r)
        r.step += 1
        strategy.after_step(r)
        sent.append(comm.meter.payload_bytes - before)
    return sent


def test_fragments_lower_the_peak_and_not_the_sum() -> None:
    whole, streamed = OverlapLocalSGD(period=8), Streaming(OverlapLocalSGD(period=8), fragments=4)
    (peak, total), (low, same) = peaks(whole), peaks(streamed)
    assert peak == 4 * low == 2 * 3 / 4 * 4 * 6400
    assert total == same


@pytest.mark.parametrize("strategy", [OverlapLocalSGD(period=4), CoCoD(period=4)], ids=str)
def test_bytes_are_those_of_local_sgd(strategy: Strategy) -> None:
    assert thinwire_explain(strategy, 100) == thinwire_explain(LocalSGD(4), 100)


test_recipes_that_cannot_work_are_refused_with_the_reason = refusals(
    [
        (lambda: OverlapLocalSGD(period=0), "period=0: must be at least 1"),
        (lambda: OverlapLocalSGD(pull=1.0), r"pull=1.0: must lie in \[0, 1\). At 1 every step would be undone"),
        (lambda: OverlapLocalSGD(momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
        (lambda: OverlapLocalSGD(lr=0.0), "lr=0.0: .* positive"),
        (lambda: OverlapLocalSGD(period=4, delay=5), "delay=5: must lie in 1..4"),
        (lambda: OverlapLocalSGD(period=4, delay=2, compensate=True), "compensate=True with delay=2"),
        (lambda: CoCoD(period=0), "period=0"),
        (lambda: Streaming(Gossip()), "has no period"),
        (lambda: Streaming(PushSum()), "has no period"),
        (lambda: Streaming(SlowMo(AllReduce(), period=4)), "sends gradients"),
        (lambda: Streaming(LocalSGD(4), fragments=5), "fragments=5: must lie between 1 and the base's period=4"),
        (lambda: Streaming(LocalSGD(4), fragments=0), "fragments=0"),
        (lambda: Streaming(SlowMo(period=4, buffers="reset"), fragments=2), "buffers='maintain'"),
    ]
)


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
def test_after_an_average_from_outside_the_anchor_does_not_go_on_moving(strategy: OverlapLocalSGD) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        (r,) = worker.replicas

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((1, 3), comm.rank + 1.0, dtype=DOUBLE)).sum().backward()
            optimizer.step()

        for _ in range(4 * strategy.period):
            step()
        average_outside(strategy, r)
        average = r.x.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(3 * strategy.period):
            step()
        return average, r.x.clone()

    for average, later in thinwire.run_threads(2, work):
        assert (later - average).abs().max() < 1e-12
