# SPDX-License-Identifier: Apache-2.0
"""Elastic workers with a GradScaler: overflows leave steps out, and neither rounds nor equal models are disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.elastic.fleets import Kill, run_fleet, survivors
from tests.elastic.test_elastic import agree
from tests.engine import batch, momentum, net
from tests.grids import fast_where
from tests.pretend_gpu import pretend_gpu
from tests.problems import flat
from thinwire import (
    AllReduce,
    ConfigError,
    DiLoCo,
    LocalSGD,
    OverlapLocalSGD,
    Paced,
    PushSum,
    SketchedSGD,
    SlowMo,
    Strategy,
)

PERIOD, STEPS = 3, 12
LOCAL: list[Strategy] = [
    LocalSGD(PERIOD),
    DiLoCo(period=PERIOD),
    SlowMo(period=PERIOD),
    OverlapLocalSGD(period=PERIOD),
    Paced(LocalSGD(PERIOD), steps=(3, 1, 2)),
    PushSum(),
]
OVERFLOWS = ((1, 4), (0, 8), (2, 8))


def local_sgd(overflows: tuple[tuple[int, int], ...]) -> Tensor:
    """Three workers' mean at the end, without an update where a worker's loss overflows."""
    models = [net() for _ in range(3)]
    optimizers = [momentum(model) for model in models]
    for step in range(STEPS):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            x, y = batch(worker, step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if (worker, step) not in overflows:
                optimizer.step()
        if (step + 1) % PERIOD == 0:
            mean = torch.stack([flat(model) for model in models]).mean(0)
            for model in models:
                torch.nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return flat(models[0])


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_worker_whose_loss_overflows_leaves_the_step_out_alone(device: str) -> None:
    with pretend_gpu():
        ends = run_fleet(3, LocalSGD(PERIOD), scale=8.0, overflows=OVERFLOWS, device=device)
    agree(survivors(ends))
    expected = local_sgd(OVERFLOWS)
    for number, end in enumerate(ends):
        assert end.agreed is not None and torch.allclose(end.agreed, expected, atol=1e-6)
        assert end.steps == STEPS, "a step that is left out counts"
        fell = [step for step in range(1, STEPS) if end.scales[step] < end.scales[step - 1]]
        assert fell == [step for worker, step in OVERFLOWS if worker == number]
    assert not torch.allclose(local_sgd(()), expected, atol=1e-3)


@pytest.mark.parametrize("strategy", LOCAL, ids=str)
@pytest.mark.parametrize(
    "events",
    [{"kills": (Kill(1, 4, 1),)}, {"kills": (Kill(0, 5, 0, after=True),)}, {"joins": (3,), "steps": 24}],
    ids=["kill", "kill after a message", "join"],
)
def test_workers_are_lost_and_join_while_others_overflow(strategy: Strategy, events: dict[str, Any]) -> None:
    ends = survivors(run_fleet(3, strategy, scale=8.0, overflows=((0, 3), (2, 4), (2, 7), (3, 9)), **events))
    agree(ends)
    assert len({end.epochs[-1] for end in ends}) == 1


def test_fused_optimizers_leave_it_out_by_themselves() -> None:
    def fused(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, fused=True)

    ends = run_fleet(3, LocalSGD(PERIOD), scale=8.0, overflows=OVERFLOWS, optimizer=fused)
    agree(survivors(ends))
    assert ends[0].agreed is not None and torch.allclose(ends[0].agreed, local_sgd(OVERFLOWS), atol=1e-6)


@pytest.mark.parametrize("at", fast_where(lambda at: at < 5, range(3, 9)))
def test_a_joining_worker_has_the_others_scale_where_gradients_are_averaged(at: int) -> None:
    """Between two growths of the scale, and just before one."""
    ends = survivors(run_fleet(2, AllReduce(), scale=8.0, joins=(at,), steps=at + 8))
    agree(ends)
    joined, other = ends[2], ends[0]
    assert 0 < len(joined.scales) < len(other.scales)
    assert joined.scales == other.scales[-len(joined.scales) :]
    whole = survivors(run_fleet(2, AllReduce(), joins=(at,), steps=at + 8))
    assert all(torch.equal(a.trace[step], b.trace[step]) for a, b in zip(ends, whole, strict=True) for step in a.trace)


def test_strategies_that_change_gradients_in_the_step_are_refused() -> None:
    (end,) = run_fleet(1, SketchedSGD(), scale=8.0)
    assert isinstance(end.error, ConfigError) and "GradScaler and SketchedSGD" in str(end.error), end.error
