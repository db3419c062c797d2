# SPDX-License-Identifier: Apache-2.0
"""LAMB: its oracle, trust, steps that are counted, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine import batches, net
from tests.methods.optimizers.one_bit_runs import SIZES, path
from tests.oracles import one_bit as oracles
from tests.problems import Regression, distance, flat
from tests.rules import refusals
from thinwire import AllReduce
from thinwire.methods.optimizers.lamb import Lamb


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_equals_its_oracle(corrected: bool, decay: float, dtype: torch.dtype) -> None:
    problem = Regression(3, 20, dtype)
    found = path(3, AllReduce(), problem, 20, Lamb, lr=0.05, weight_decay=decay, bias_correction=corrected)[-1]
    hyperparameters = oracles.Hyperparameters(rate=0.05, decay=decay, corrected=corrected)
    expected = oracles.lamb(problem.gradient, problem.start.expand(3, -1), SIZES, 20, hyperparameters)
    assert distance(found, expected) < (1e-11 if dtype == torch.float64 else 1e-4)


def one(value: list[float], gradient: list[float], dtype: torch.dtype = torch.float64) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(value, dtype=dtype))
    parameter.grad = torch.tensor(gradient, dtype=dtype)
    return parameter


def test_a_step_is_in_proportion_to_the_tensor() -> None:
    x = one([3.0, 4.0], [1.0, -1.0])
    Lamb([x], lr=0.1).step()
    moved = torch.tensor([3.0, 4.0], dtype=torch.float64) - x.detach()
    assert torch.allclose(moved.norm(), torch.tensor(0.1 * 5.0, dtype=torch.float64), rtol=1e-6)


def test_trust_is_bounded_on_both_sides() -> None:
    large, small = one([1e3], [1.0]), one([1e-6], [1.0])
    Lamb([large, small], lr=0.1, least_trust=0.5, most_trust=2.0).step()
    assert torch.allclose(1e3 - large.detach(), torch.tensor([0.2], dtype=torch.float64))
    assert torch.allclose(1e-6 - small.detach(), torch.tensor([0.05], dtype=torch.float64))


def test_a_tensor_of_zeros_moves_like_adam_s() -> None:
    x = one([0.0, 0.0], [1.0, -2.0])
    Lamb([x], lr=0.1).step()
    assert torch.allclose(x.detach(), torch.tensor([-0.1, 0.1], dtype=torch.float64))


def test_nothing_moves_without_a_gradient() -> None:
    x, empty, still = one([1.0], [1.0]), one([], []), nn.Parameter(torch.ones(2))
    optimizer = Lamb([x, empty, still])
    optimizer.step()
    assert torch.equal(still.detach(), torch.ones(2))
    assert set(optimizer.state) == {x}


def test_only_steps_that_move_something_are_counted() -> None:
    x, still = one([1.0, 2.0], [1.0, -1.0]), nn.Parameter(torch.ones(2))
    optimizer = Lamb([{"params": [x]}, {"params": [still]}], lr=0.1)
    optimizer.step()
    kept, x.grad = x.grad, None
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [1, 0]
    x.grad = kept
    optimizer.step()
    y = one([1.0, 2.0], [1.0, -1.0])
    uninterrupted = Lamb([y], lr=0.1)
    for _ in range(2):
        uninterrupted.step()
    assert torch.equal(x.detach(), y.detach())


def test_a_resumed_optimizer_goes_on_bit_for_bit_in_sixteen_bits_too() -> None:
    def run(count: int, saved: dict[str, Any] | None = None) -> tuple[nn.Sequential, Lamb]:
        model = net().to(torch.bfloat16)
        optimizer = Lamb(model.parameters(), lr=0.01)
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for x, y in batches(0, 3, first=3 if saved is not None else 0) if count == 3 else batches(0, count):
            optimizer.zero_grad()
            (model(x.bfloat16()) - y).square().mean().backward()
            optimizer.step()
        return model, optimizer

    whole, _ = run(6)
    model, optimizer = run(3)
    again, _ = run(3, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert torch.equal(flat(whole), flat(again))


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    x = one([1.0], [1.0])
    calls: list[int] = []

    def closure() -> float:
        calls.append(1)
        return 7.0

    assert Lamb([x]).step(closure) == 7.0
    assert len(calls) == 1


test_values_out_of_their_range_are_refused = refusals(
    [
        ({"lr": -1.0}, "lr=-1.0: must be finite"),
        ({"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\): must be two numbers"),
        ({"eps": 0.0}, "eps=0.0: must be positive"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: must be finite"),
        ({"least_trust": 2.0, "most_trust": 1.0}, "least_trust=2.0, most_trust=1.0"),
    ],
    lambda settings: Lamb([one([1.0], [1.0])], **settings),
)
