# SPDX-License-Identifier: Apache-2.0
"""The bytes of all tensors that a worker of a 1-bit method holds between steps: the table in the docs."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.methods.optimizers.one_bit_runs import Kind
from thinwire import Comm
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.freezing import FreezingOptimizer
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum

WIDTH, STEPS = 256, 5


def bytes_a_parameter(kind: type[torch.optim.Optimizer], strategy: thinwire.Strategy, size: int) -> float:
    """Of rank 0, parameters, gradients, and the state of optimizer and strategy, each memory once."""

    def body(comm: Comm) -> float:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        optimizer = kind(model.parameters(), lr=0.01)  # type: ignore[call-arg]
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).square().sum().backward()
            optimizer.step()
        if isinstance(optimizer, FreezingOptimizer):
            assert optimizer.frozen
        (r,) = worker.replicas
        held: list[Tensor] = [model.weight.detach(), r.x, r.g, *r.state.values()]
        held += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        held += [] if model.weight.grad is None else [model.weight.grad]
        memory = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
        worker.detach()
        return sum(memory.values()) / WIDTH**2

    gc.collect()
    return thinwire.run_threads(size, body, timeout=30)[0]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kind", "fresh"),
    [(OneBitLamb, 4), (OneBitAdam, 0)],
)
def test_a_1_bit_method_holds_the_bytes_of_the_table(kind: Kind, fresh: int, size: int) -> None:
    codec = OneBit(block=2048)
    plain, overlapped = (
        bytes_a_parameter(kind, CompressedMomentum(codec, warmup_steps=2, overlap=overlap), size)
        for overlap in (False, True)
    )
    of_adam = bytes_a_parameter(torch.optim.AdamW, thinwire.AllReduce(), size)
    assert of_adam == pytest.approx(16, abs=0.01)
    assert plain == pytest.approx(of_adam + fresh + 4 + 4 / size, abs=0.01)
    assert overlapped == pytest.approx(plain + 4, abs=0.01)
