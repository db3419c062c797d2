# SPDX-License-Identifier: Apache-2.0
"""Workers that take different numbers of steps in a round are lost and join."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.elastic.fleets import Kill, run_fleet, survivors
from tests.elastic.test_elastic import agree
from tests.engine import batch, net
from tests.oracles.paced import rounds_among
from thinwire import DiLoCo, LocalSGD, Paced, SlowMo

PERIOD, STEPS, RATE = 4, (4, 1, 3), 0.1


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def gradient(x: Tensor, worker: int, step: int) -> Tensor:
    model = net()
    nn.utils.vector_to_parameters(x, model.parameters())
    inputs, targets = batch(worker, step)
    (model(inputs) - targets).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def expected(rounds: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    start = torch.cat([p.detach().flatten() for p in net().parameters()])
    return rounds_among(gradient, start, rate=RATE, period=PERIOD, rounds=rounds)


def among(*workers: int) -> list[tuple[int, int]]:
    """A round of these workers, whose steps follow their ranks."""
    return [(worker, STEPS[rank]) for rank, worker in enumerate(workers)]


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("after", [False, True])
def test_a_lost_worker_leaves_its_round_and_the_others_end_it(call: int, after: bool) -> None:
    """In each call at a round's end: the survivors all have its result, with the lost worker or without it."""
    kill = Kill(1, PERIOD + 1, call, after)
    ends = survivors(run_fleet(3, Paced(LocalSGD(PERIOD), steps=STEPS), kills=(kill,), optimizer=plain))
    agree(ends)
    assert ends[0].x is not None
    # A round makes three calls. In a repeated round the survivors keep the steps that they have taken.
    before, whole, repeated, later = call // 3 + 1, among(0, 1, 2), [(0, STEPS[0]), (2, STEPS[2])], among(0, 2)
    possible = [[*[whole] * before, last, *[later] * (2 - before)] for last in (whole, repeated)]
    assert any(torch.allclose(ends[0].x, expected(rounds), atol=1e-6) for rounds in possible)


def test_a_joining_worker_takes_part_from_the_next_round_on() -> None:
    steps = 6 * PERIOD
    ends = survivors(run_fleet(2, Paced(LocalSGD(PERIOD), steps=STEPS), joins=(PERIOD,), steps=steps, optimizer=plain))
    agree(ends)
    assert len(ends) == 3 and ends[2].x is not None
    begins = min(ends[2].trace)
    assert begins % PERIOD == 0
    alone = begins // PERIOD
    found = expected([*[among(0, 1)] * alone, *[among(0, 1, 2)] * (steps // PERIOD - alone)])
    assert torch.allclose(ends[2].x, found, atol=1e-6)


@pytest.mark.parametrize("base", [LocalSGD(PERIOD), SlowMo(period=PERIOD), DiLoCo(period=PERIOD)], ids=repr)
def test_measured_rounds_go_on_through_losses_and_joins(base: thinwire.Strategy) -> None:
    strategy = Paced(base)
    ends = survivors(run_fleet(3, strategy, steps=8 * PERIOD, kills=(Kill(0, 2 * PERIOD),), joins=(3 * PERIOD,)))
    agree(ends)
    assert len(ends) == 3
    assert all(0 < end.steps <= 8 * PERIOD for end in ends)
