# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose `step` calls that of their base class: torch runs the hooks of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from thinwire import Comm, LocalSGD, Strategy, attach, run_threads


class Own(torch.optim.SGD):
    """Another class's step, and something besides; fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


def train(comm: Comm, kind: type[torch.optim.SGD], strategy: Strategy, *, fails: int = -1) -> tuple[int, Tensor]:
    model = nn.Linear(3, 1)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    # Torch wraps the step of a class when the first object of it is made.
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    worker = attach(model, optimizer, strategy, comm=comm)
    for step in range(6):
        optimizer.zero_grad()
        model(torch.full((1, 3), 0.1 * (1 + comm.rank + step))).square().mean().backward()
        if step == fails:
            Own.fails = True
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            Own.fails = False
        optimizer.step()
    return worker.step, torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_step_that_failed_is_no_outer_one_of_the_next() -> None:
    ((steps, x),) = run_threads(1, lambda comm: train(comm, torch.optim.SGD, LocalSGD(period=3)))
    ((own_steps, own_x),) = run_threads(1, lambda comm: train(comm, Own, LocalSGD(period=3), fails=2))
    assert steps == own_steps == 6
    assert torch.equal(x, own_x)
