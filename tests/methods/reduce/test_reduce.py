# SPDX-License-Identifier: Apache-2.0
"""Means, compressed means and gossip."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire import Comm, CountingComm, Fp16, Ring, run_threads
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_, gossip_, mean_, mix_
from thinwire.methods.topology import Peers

SIZES = [1, 2, 3, 5]


def rows(n: int) -> Tensor:
    """A different vector of 6 for each rank."""
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


@pytest.mark.parametrize("n", SIZES)
def test_the_mean_is_the_same_bits_on_every_rank(n: int) -> None:
    means = torch.stack(run_threads(n, lambda comm: mean_(comm, rows(n)[comm.rank].clone()).wait()))
    assert torch.equal(means, means[:1].expand_as(means))
    assert torch.allclose(means[0], rows(n).mean(0), rtol=0, atol=1e-15)


def test_a_mean_with_a_count_divides_by_the_ranks_that_contribute() -> None:
    def body(comm: Comm) -> Tensor:
        x = rows(3)[comm.rank].clone() if comm.rank < 2 else torch.zeros(6, dtype=torch.float64)
        return mean_(comm, x, count=2).wait()

    for mean in run_threads(3, body):
        assert torch.allclose(mean, rows(3)[:2].mean(0), rtol=0, atol=1e-15)


def test_mixing_weighs_each_vector_by_its_own_weight() -> None:
    x, y, z = rows(3)
    mixed = mix_(x.clone(), [y, z], Peers((), (4, 7), 0.5, (0.375, 0.125)))
    assert torch.allclose(mixed, 0.5 * x + 0.375 * y + 0.125 * z, rtol=0, atol=1e-15)


def test_mixing_refuses_another_number_of_vectors_than_neighbours() -> None:
    x, y, _ = rows(3)
    with pytest.raises(ValueError, match="shorter"):
        mix_(x.clone(), [y], Peers((), (4, 7), 0.5, (0.375, 0.125)))


def test_on_the_counting_comm_every_rank_holds_the_same() -> None:
    comm = CountingComm(1, 4)
    x = rows(1)[0]
    assert torch.allclose(mean_(comm, x.clone()).wait(), x, rtol=0, atol=1e-15)
    assert torch.allclose(gossip_(comm, x.clone(), Ring().peers(1, 4, 0)).wait(), x, rtol=0, atol=1e-15)
    assert comm.meter.by_operation == {"all_reduce": 2 * 3 * 48 / 4, "send_recv": 2 * 48}


@pytest.mark.parametrize("codec", [None, Fp16()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_means_in_fp16_are_finite_where_the_sum_is_not(codec: Fp16 | None, dtype: torch.dtype) -> None:
    def work(comm: Comm) -> list[float]:
        x = torch.tensor([40000.0, 30000.0, 1.0, -0.25], dtype=dtype)
        work = mean_(comm, x) if codec is None else compressed_mean_(comm, x, codec, {})
        return work.wait().tolist()

    assert run_threads(4, work) == [[40000.0, 30000.0, 1.0, -0.25]] * 4


@pytest.mark.parametrize(
    "recipe",
    [
        "AllReduce()",
        "AllReduce(codec=Fp16())",
        "BackupWorkers()",
        "NodeAverage(LocalSGD(4), period=1, node_size=3)",
    ],
)
def test_strategies_whose_sums_overflow_fp16_train_where_the_mean_is_finite(recipe: str) -> None:
    def train(comm: Comm) -> list[float]:
        model = nn.Linear(1, 3, bias=False).half()
        nn.init.constant_(model.weight, 30000.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        worker = thinwire.attach(model, optimizer, recipe, comm=comm)
        scale = torch.tensor([40000.0, -30000.0, 1.0], dtype=torch.float16)
        while worker.step < 1:
            optimizer.zero_grad()
            (model(torch.ones(1, 1, dtype=torch.float16)) * scale).backward(torch.ones(1, 3, dtype=torch.float16))
            optimizer.step()
        worker.detach()
        return model.weight.flatten().tolist()

    wanted = torch.tensor([10000.0, 45000.0, 30000.0], dtype=torch.float16).tolist()
    for found in thinwire.run_threads(3, train, timeout=20):
        assert found == pytest.approx(wanted, rel=2e-3)
