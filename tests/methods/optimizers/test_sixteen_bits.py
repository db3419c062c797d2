# SPDX-License-Identifier: Apache-2.0
"""Parameters in 16 bits and their copy in fp32: strategies move the first, and steps the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import attach, batches, flat, net, steps
from thinwire import Comm, LocalSGD
from thinwire.methods.optimizers.freezing import FreezingOptimizer
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam

KINDS = [Lamb, OneBitAdam, OneBitLamb, ZeroOneAdam]
BF16 = torch.bfloat16


def data(rank: int, count: int, first: int = 0) -> list[tuple[Tensor, Tensor]]:
    return [(x.to(BF16), y.to(BF16)) for x, y in batches(rank, count, first=first)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_does_not_undo_the_average_before_it(kind: Any) -> None:
    def body(comm: Comm) -> list[Tensor]:
        worker = attach(
            comm, LocalSGD(period=2), model=net().to(BF16), optimizer=lambda m: kind(m.parameters(), lr=0.05)
        )
        alone = flat(steps(worker, data(comm.rank, 1)).model)
        average = flat(steps(worker, data(comm.rank, 1, first=1)).model)
        worker.optimizer.param_groups[0]["lr"] = 0.0
        after = flat(steps(worker, data(comm.rank, 1, first=2)).model)
        worker.detach()
        return [alone, average, after]

    (alone, average, after), (other, same, follows) = thinwire.run_threads(2, body, timeout=20)
    assert not torch.equal(alone, other)
    assert torch.equal(average, same)
    assert torch.equal(after, average)
    assert torch.equal(follows, average)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_only_entries_that_were_set_from_outside_lose_their_digits(kind: Any, frozen: bool) -> None:
    x = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=BF16))
    optimizer = kind([x], lr=1e-4)
    for step in range(10):
        x.grad = torch.tensor([0.5, 0.25, -1.0], dtype=BF16)
        optimizer.step()
        if frozen and step == 5 and isinstance(optimizer, FreezingOptimizer):
            optimizer.freeze()
    digits = optimizer.state[x]["master"].clone()
    assert (digits != digits.to(BF16).float()).all()
    with torch.no_grad():
        x[1] = 0.5
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(optimizer.state[x]["master"], torch.stack([digits[0], torch.tensor(0.5), digits[2]]))
    assert x[1] == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_steps_alone_are_the_roundings_of_those_in_fp32(kind: Any) -> None:
    coarse, fine = (nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=dtype)) for dtype in (BF16, torch.float32))
    optimizers = [kind([x], lr=1e-4) for x in (coarse, fine)]
    for step in range(40):
        for x, optimizer in zip((coarse, fine), optimizers, strict=True):
            x.grad = torch.tensor([0.5, 0.25, -1.0], dtype=x.dtype)
            optimizer.step()
            if step == 20 and isinstance(optimizer, FreezingOptimizer):
                optimizer.freeze()
    assert torch.equal(optimizers[0].state[coarse]["master"], fine.detach())
    assert torch.equal(coarse.detach(), fine.detach().to(BF16))
