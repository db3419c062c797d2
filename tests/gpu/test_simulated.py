# SPDX-License-Identifier: Apache-2.0
"""Workers of one process that share a GPU train there as on the CPU: on threads, and on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from thinwire import Comm
from thinwire.planning import simulate

STEPS, WORKERS = 4, 3
# On a machine without a GPU the same is asked of the CPU, so that these tests are known to run.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.gpu
RECIPES = ["AllReduce()", "AllReduce(codec=PowerSGD(1))", "DiLoCo(period=2)", "PushSum()"]
WORLDS: dict[str, Callable[[Callable[[Comm], Any]], list[Any]]] = {
    "threads": lambda work: thinwire.run_threads(WORKERS, work, timeout=40),
    "virtual clock": lambda work: simulate.run(WORKERS, work),
}


def trained(comm: Comm, recipe: str, device: str) -> torch.Tensor:
    # Random states are the process's, which threads share.
    weights = torch.linspace(-1, 1, 8 * 16 + 16 * 4).split([8 * 16, 16 * 4])
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
    for parameter, values in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(values.view_as(parameter))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = thinwire.attach(model, optimizer, recipe, comm=comm, bucket_bytes=256)
    for step in range(STEPS):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * comm.rank + step)).to(device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    with worker.consensus():
        return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("world", WORLDS)
def test_workers_of_one_process_train_on_a_gpu_as_on_the_cpu(world: str, recipe: str) -> None:
    there, here = (WORLDS[world](lambda comm, d=device: trained(comm, recipe, d)) for device in (DEVICE, "cpu"))
    for found, wanted in zip(there, here, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", WORLDS)
def test_backward_passes_run_in_their_worker_s_thread(world: str) -> None:
    # In torch's own thread, which all GPU work of a process shares, one worker would wait for the others there.
    assert not any(WORLDS[world](lambda comm: torch._C._is_multithreading_enabled()))
    assert torch._C._is_multithreading_enabled()
