# SPDX-License-Identifier: Apache-2.0
"""Methods that hide their messages: Overlap Local-SGD, CoCoD-SGD, and fragments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.oracles.common import Descent
from tests.oracles.machines import Decoupled, Machine, Overlap, path
from tests.problems import Regression, average_outside, distance, together
from tests.rules import refusals
from thinwire import (
    AllReduce,
    CoCoD,
    Comm,
    Gossip,
    LocalSGD,
    OverlapLocalSGD,
    PushSum,
    SlowMo,
    Strategy,
    Streaming,
)
from thinwire.planning.plan.traffic import DryRun

DOUBLE = torch.float64
STEPS = 23
RATES = [0.02 * (k + 1) for k in range(5)] + [0.1] * (STEPS - 5)

CASES: list[tuple[Strategy, Callable[[], Machine], dict[str, Any]]] = [
    (
        OverlapLocalSGD(period=5, pull=0.3, momentum=0.0),
        lambda: Overlap(5, pull=0.3, momentum=0.0),
        {"momentum": 0.9, "nesterov": True},
    ),
    (
        OverlapLocalSGD(period=6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        lambda: Overlap(6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        {"momentum": 0.9},
    ),
    (OverlapLocalSGD(period=1), lambda: Overlap(1), {}),
    (CoCoD(period=1), lambda: Decoupled(1), {}),
]


@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [1, 3, 4]))
def test_forms_that_the_battery_does_not_have_equal_their_oracle(n: int) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    for strategy, machine, settings in CASES:
        real = together(n, strategy, problem, RATES, **settings)
        update = Descent(RATES, **settings)
        wanted = path(machine(), problem.gradient, problem.start.expand(n, -1), update, RATES)[-1]
        assert distance(real, wanted) < 1e-12, strategy


@pytest.mark.parametrize("base", [OverlapLocalSGD(period=4), LocalSGD(4), SlowMo(period=4), CoCoD(period=4)], ids=str)
def test_one_fragment_is_the_base(base: Strategy) -> None:
    problem = Regression(3, STEPS, torch.float32)
    assert torch.equal(
        together(3, Streaming(base, fragments=1), problem, RATES, momentum=0.9),
        together(3, base, problem, RATES, momentum=0.9),
    )


def sent(strategy: Strategy) -> list[float]:
    """The bytes of each of 48 steps."""
    run = DryRun(strategy, [6400], workers=4, rank=0, dtype=torch.float32, bucket_bytes=1)
    return [run.step().sent for _ in range(48)]


def test_fragments_lower_the_peak_and_not_the_sum() -> None:
    whole, streamed = sent(OverlapLocalSGD(8)), sent(Streaming(OverlapLocalSGD(8), fragments=4))
    assert max(whole) == 4 * max(streamed) == 2 * 3 / 4 * 4 * 6400
    assert sum(whole) == sum(streamed)


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


@pytest.mark.parametrize(
    "strategy",
    [
        OverlapLocalSGD(period=2, pull=0.6, momentum=0.0),
        OverlapLocalSGD(period=2, pull=0.6, momentum=0.7),
        OverlapLocalSGD(period=2, pull=0.2, momentum=0.7),
        OverlapLocalSGD(period=3, pull=0.5, momentum=0.9, lr=0.4, nesterov=True),
        OverlapLocalSGD(period=4, pull=0.5, momentum=0.9, lr=0.4, nesterov=True, delay=1),
    ],
    ids=str,
)
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
