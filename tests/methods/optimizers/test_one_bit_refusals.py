# SPDX-License-Identifier: Apache-2.0
"""1-bit methods: what is refused, and what a loop may not do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import net
from tests.methods.optimizers.one_bit_runs import begun, taken
from tests.problems import Regression, flat
from tests.rules import refusals
from thinwire import Comm, ConfigError
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum

OVERLAPPED = CompressedMomentum(OneBit(block=8), warmup_steps=4, overlap=True)


test_recipes_out_of_range_are_refused = refusals(
    [
        ({"warmup_steps": 0}, "warmup_steps=0: must be at least 1. The variance needs"),
        ({"settled": 1.0}, r"settled=1.0: must lie in \(0, 1\)"),
        ({"max_norm": 0.0}, "max_norm=0.0: must be positive"),
        ({"max_norm": 1.0, "overlap": True}, "overlap=True, max_norm=1.0"),
        ({"codec": 3}, "codec must be"),
    ],
    lambda settings: CompressedMomentum(**settings),
)


test_optimizers_out_of_range_are_refused = refusals(
    [
        ({"trust_beta": 1.0}, "trust_beta=1.0"),
        ({"least_factor": 2.0}, "least_factor=2.0, most_factor=4.0"),
        ({"factor_change": 0.0}, "factor_change=0.0"),
        ({"betas": (0.9, 1.0)}, "betas="),
    ],
    lambda settings: OneBitLamb(net().parameters(), **settings),
)


def test_an_optimizer_that_cannot_freeze_is_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"AdamW under CompressedMomentum.*Use OneBitLamb or OneBitAdam"):
        thinwire.attach(model, torch.optim.AdamW(model.parameters()), CompressedMomentum())


def test_parameters_added_after_the_variance_is_frozen_are_refused() -> None:
    model, late = net(), nn.Parameter(torch.ones(3))
    optimizer = OneBitLamb(model.parameters())
    optimizer.freeze()
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    with pytest.raises(ConfigError, match="3 elements was added after the variance was frozen"):
        optimizer.step()


@pytest.mark.parametrize("start", [0, 70_001, 199_900])
def test_a_change_of_some_hundred_entries_in_a_row_is_noticed_in_a_long_gradient(start: int) -> None:
    def body(comm: Comm) -> None:
        x = nn.ParameterList([nn.Parameter(torch.ones(200_000))])
        worker = begun(comm, CompressedMomentum(warmup_steps=1, overlap=True), x, lr=0.01)
        for step in range(3):
            worker.optimizer.zero_grad()
            x[0].square().sum().backward()
            if step == 2:
                assert x[0].grad is not None
                x[0].grad[start : start + 100] *= 0.5
                with pytest.raises(ConfigError, match="step 2: gradients were changed"):
                    worker.optimizer.step()
                continue
            worker.optimizer.step()
        worker.detach()

    thinwire.run_threads(2, body, timeout=20)


def test_a_pass_that_was_never_stepped_on_is_forgotten() -> None:
    problem = Regression(2, 8, torch.float32)

    def body(comm: Comm) -> Tensor:
        worker = begun(comm, OVERLAPPED, problem.model(), lr=0.03)
        taken(worker, problem, 0, 6)
        problem.loss(worker.model, comm.rank, 6).backward()
        taken(worker, problem, 7, 8)
        worker.detach()
        assert not worker.replicas[0].inflight
        return flat(worker.model)

    first, second = thinwire.run_threads(2, body, timeout=20)
    assert torch.equal(first, second)
    assert first.isfinite().all()
