# SPDX-License-Identifier: Apache-2.0
"""Residuals in the dtype of the model, against a loop over all workers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire import (
    AllReduce,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    OneBit,
    OverlapLocalSGD,
    Strategy,
    run_threads,
)
from thinwire.worker.worker import internals_of

SIZE, N, STEPS = 2, 32, 4
CODEC = ErrorFeedback(OneBit(8), residual="model")


def inputs() -> Tensor:
    """Multiples of 1/8, of which sums and means are exact in fp32: [steps, workers, elements]."""
    numbers = torch.randint(-40, 40, (STEPS, SIZE, N), generator=torch.Generator().manual_seed(0))
    return (numbers / 8).to(torch.bfloat16)


def one_bit(x: Tensor) -> Tensor:
    rows = x.view(-1, 8)
    return torch.where(rows < 0, -1.0, 1.0).mul(rows.abs().mean(1, keepdim=True)).view(-1)


def expected_means() -> list[Tensor]:
    """Gradients of each step: workers' residuals and the server's, each rounded to bf16 after each message."""
    errors, server = torch.zeros(SIZE, N, dtype=torch.bfloat16), torch.zeros(N, dtype=torch.bfloat16)
    found: list[Tensor] = []
    for xs in inputs():
        sent: list[Tensor] = []
        for rank, x in enumerate(xs):
            wanted = x.float() + errors[rank].float()
            sent.append(one_bit(wanted))
            errors[rank] = wanted - sent[-1]
        wanted = (sent[0] + sent[1]) / SIZE + server.float()
        mean = one_bit(wanted)
        server = (wanted - mean).to(torch.bfloat16)
        found.append(mean.to(torch.bfloat16))
    return found


def test_residuals_are_in_the_model_s_dtype_and_rounded_after_each_message() -> None:
    def work(comm: Comm) -> list[Tensor]:
        model = nn.Linear(N, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        worker = thinwire.attach(model, optimizer, AllReduce(CODEC), comm=comm)
        found: list[Tensor] = []
        for x in inputs():
            optimizer.zero_grad()
            model(x[comm.rank]).sum().backward()
            found.append(model.weight.grad.flatten().clone())  # type: ignore[union-attr]
            optimizer.step()
        state = internals_of(worker).replicas[0].state
        kept = [x for name, x in state.items() if "error" in name]
        assert sum(x.nbytes for x in kept) == 2 * (N + N // SIZE)
        assert {x.dtype for x in kept} == {torch.bfloat16}
        return found

    for found in run_threads(SIZE, work, timeout=20):
        assert all(torch.equal(mine, mean) for mine, mean in zip(found, expected_means(), strict=True))


@pytest.mark.parametrize("strategy", [DiLoCo(period=1, codec=CODEC), LocalSGD(period=1, codec=CODEC)], ids=str)
def test_means_of_parameters_keep_such_residuals_too(strategy: Strategy) -> None:
    def work(comm: Comm) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(N, 1, bias=False, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for x in inputs():
            optimizer.zero_grad()
            model(x[comm.rank]).sum().backward()
            optimizer.step()
        state = internals_of(worker).replicas[0].state
        kept = [x for name, x in state.items() if "error" in name]
        assert sum(x.nbytes for x in kept) == 2 * (N + N // SIZE), {name: x.dtype for name, x in state.items()}
        assert all(x.any() for x in kept)
        return model.weight.detach().clone()

    first, second = run_threads(SIZE, work, timeout=20)
    assert torch.equal(first, second)


def test_a_residual_that_contains_parameters_must_be_in_fp32() -> None:
    model = nn.Linear(2, 1, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"contains parameters here.*residual='fp32'"):
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), OverlapLocalSGD(period=2, codec=CODEC))


def test_an_unknown_residual_is_refused() -> None:
    with pytest.raises(ConfigError, match="residual must be 'fp32' or 'model'"):
        ErrorFeedback(residual="bf16")  # type: ignore[arg-type]
