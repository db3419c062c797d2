# SPDX-License-Identifier: Apache-2.0
"""Slow momentum where learning rates are zero or differ, messages of Local SGD, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles.common import Descent
from tests.oracles.machines import Machine, SlowMomentum, path
from tests.problems import Regression, distance, quadratic, together, watched
from tests.rules import refusals
from thinwire import Local, LocalSGD, PushSum, Replica, SlowMo, Strategy

DOUBLE = torch.float64


def slow_vectors(r: Replica) -> Tensor:
    return torch.cat([r.x, r.state["anchor"], r.state["slow"]])


@pytest.mark.parametrize("base", [Local(), PushSum()], ids=str)
def test_a_round_at_a_learning_rate_of_zero_moves_nothing_and_momentum_decays(base: Strategy) -> None:
    rates = [0.1] * 4 + [0.0] * 4 + [0.1] * 4
    seen = watched(4, SlowMo(base, period=4, momentum=0.5), quadratic(4, DOUBLE), rates, slow_vectors)
    x, _, slow = seen.chunk(3, dim=-1)
    assert torch.equal(x[7], x[3])
    assert torch.equal(slow[7], 0.5 * slow[3])
    assert seen.isfinite().all()
    assert distance(x[11], x[7]) > 1e-3


def test_a_round_that_was_begun_anew_divides_by_the_rates_of_its_own_steps() -> None:
    r = Replica(torch.ones(1, dtype=DOUBLE), torch.empty(0), thinwire.CountingComm(0, 1), lr=lambda: 0.1)
    strategy = SlowMo(period=4, momentum=0.5)
    strategy.start(r)
    for step in range(4):
        if step == 2:
            strategy.restart(r)
        r.x.sub_(0.1)
        r.step += 1
        strategy.after_step(r)
    assert r.state["slow"].item() == pytest.approx(2.0)


def test_each_parameter_group_has_a_slow_rate_of_its_own() -> None:
    n, factors = 3, [1.0, 0.5, 0.0]
    problem = Regression(n, 20, DOUBLE)
    warming = [0.01 * (k + 1) for k in range(20)]
    sizes = [20, 4, 8, 2]
    factor = torch.cat([torch.full((size,), factors[i % 3], dtype=DOUBLE) for i, size in enumerate(sizes)])
    slow = together(n, SlowMo(period=5, momentum=0.6, lr=0.9), problem, warming, factors=factors, momentum=0.9)
    # A zero rate must not be divided by; the oracle gets one so small that it moves nothing either.
    rates = [rate * factor.clamp(min=1e-30) for rate in warming]
    start, update = problem.start.expand(n, -1), Descent(rates, momentum=0.9)
    wanted = path(SlowMomentum(Machine(), 5, momentum=0.6, lr=0.9), problem.gradient, start, update, rates)
    assert distance(slow, wanted[-1]) < 1e-12
    assert torch.equal(slow[0, 24:32], problem.start[24:32])


test_recipes_that_cannot_work_are_refused_with_the_value_and_the_rule = refusals(
    [
        (lambda: LocalSGD(True), r"period must be a whole number"),
        (lambda: SlowMo(LocalSGD), r"base must be a Strategy. Write LocalSGD\(\)"),
        (lambda: SlowMo(period=-1), "period=-1: must be at least 1"),
        (lambda: SlowMo(momentum=float("nan")), r"momentum=nan: must lie in \[0, 1\)"),
        (lambda: SlowMo(lr=0.0), "lr=0.0: must be positive"),
        (lambda: PushSum("ring"), "topology must be a Topology"),
    ]
)
