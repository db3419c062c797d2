# SPDX-License-Identifier: Apache-2.0
"""A training step does not wait for the GPU, except where it must know whether to take the step.

On a pretended GPU, operations that wait are recorded; on a real one torch raises at the first of them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import thinwire
from tests.pretend_gpu import GPU, REAL, as_over_nccl, host_waits, pretend_gpu
from thinwire import Comm
from thinwire.core.comm import base
from thinwire.core.kernels import decisions, reading
from thinwire.methods.strategies.wrappers import paced

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
# The reads of one step at most: of its gradient, and of the flags of its compressed means with the check of their call.
RECIPES = [
    ("AllReduce()", 1),
    ("AllReduce(codec=ErrorFeedback(Nearest(bits=4)))", 2),
    ("AllReduce(codec=Quantize(bits=4))", 2),
    ("AllReduce(codec=Bf16())", 1),
    ("AllReduce(codec=PowerSGD(1))", 2),
    ("AllReduce(codec=ErrorFeedback(Gathered(OneBit())))", 2),
    ("AllReduce(codec=ErrorFeedback(TopK(0.1)))", 2),
    ("AllReduce(codec=ErrorFeedback(Gathered(ChunkedTopK(kept=8, chunk=64))))", 2),
    ("AllReduce(codec=RandomK(0.1))", 2),
    ("LocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4)))", 3),
    ("DiLoCo(period=2, codec=ErrorFeedback(Nearest(bits=4)))", 3),
    ("OverlapLocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4)))", 4),
    ("Budget(LocalSGD(period=2, codec=ErrorFeedback(Nearest(bits=4))), '1MB/step')", 3),
    ("CHOCO()", 2),
    ("CompressedMomentum(warmup_steps=2)", 3),
    ("DQSGD()", 3),
    ("Paced(LocalSGD(period=2), steps=(2, 2))", 3),  # measured steps could differ, and the threads meet
]


def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Record the reads of values that the host needs, by thread."""
    reads: dict[int, list[str]] = defaultdict(list)
    for module in (reading, base, decisions, paced):
        read: Callable[[torch.Tensor], torch.Tensor] = module.read_host

        def recorded(x: torch.Tensor, read: Callable[[torch.Tensor], torch.Tensor] = read) -> torch.Tensor:
            if x.is_cuda:
                reads[threading.get_ident()].append(f"{x.numel()} {x.dtype}")
            return read(x)

        monkeypatch.setattr(module, "read_host", recorded)
    return reads


@pytest.mark.parametrize(("recipe", "most"), RECIPES)
def test_a_step_waits_for_the_gpu_only_to_know_whether_it_is_taken(
    recipe: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = counted(monkeypatch)

    # Torch's mode is that of the process, so the threads enter and leave it together.
    together = threading.Barrier(2, timeout=30)

    def work(comm: Comm) -> list[Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 96), torch.nn.Linear(96, 32), torch.nn.Linear(32, 1)).to(GPU)
        freezes = recipe.startswith("CompressedMomentum")
        optimizer = (
            thinwire.OneBitAdam(model.parameters(), lr=1e-4)
            if freezes
            else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        )
        thinwire.attach(model, optimizer, recipe, comm=as_over_nccl(comm), bucket_bytes=4096)
        inputs = [torch.full((2, 8), 0.1 * (comm.rank + step % 3 + 1), device=GPU) for step in range(10)]
        mine = reads[threading.get_ident()]
        found: list[Any] = []
        for step, x in enumerate(inputs):
            optimizer.zero_grad(set_to_none=step % 4 < 2)
            before = len(mine)
            # The checks of the first steps, and the allocation of state, read more.
            together.wait()
            with host_waits(found) if step >= 6 else nullcontext():
                model(x).square().mean().backward()
                optimizer.step()
                together.wait()
            if step >= 6:
                assert len(mine) - before <= most, mine[before:]
        return found

    with pretend_gpu():
        assert thinwire.run_threads(2, work, timeout=30) == [[], []]


def test_residuals_are_scaled_as_gradients_are_without_a_wait() -> None:
    together = threading.Barrier(2, timeout=30)

    def work(comm: Comm) -> list[str]:
        torch.manual_seed(0)
        model, found = torch.nn.Linear(8, 4).to(GPU), list[str]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler(GPU.type if REAL else "cpu", init_scale=8.0)
        recipe = "AllReduce(codec=ErrorFeedback(OneBit()))"
        thinwire.attach(model, optimizer, recipe, comm=as_over_nccl(comm), scaler=scaler, bucket_bytes=16)
        x = torch.full((2, 8), comm.rank + 1.0, device=GPU)
        for step in range(8):
            optimizer.zero_grad()
            loss = scaler.scale(model(x).square().mean())
            together.wait()
            with host_waits(found) if step >= 6 else nullcontext():
                loss.backward()
                together.wait()
            scaler.step(optimizer)
            scaler.update()
        return found

    with pretend_gpu():
        assert thinwire.run_threads(2, work, timeout=30) == [[], []]
