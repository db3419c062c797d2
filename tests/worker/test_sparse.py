# SPDX-License-Identifier: Apache-2.0
"""Sparse gradients, which are dense once they are exchanged: optimizers that need them, and passes that fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.engine import drawn, flat
from thinwire import AllReduce, Comm, ConfigError, DiLoCo, LocalSGD, MismatchError, Strategy, Worker, run_threads


def table() -> nn.Module:
    return drawn(nn.EmbeddingBag(6, 2, sparse=True))


def with_sparse_adam(comm: Comm, strategy: Strategy) -> Worker:
    model = table()
    return thinwire.attach(model, torch.optim.SparseAdam(model.parameters(), lr=0.1), strategy, comm=comm)


def backward(worker: Worker, *rows: int) -> None:
    worker.model(torch.tensor([rows])).square().sum().backward()


@pytest.mark.parametrize("strategy", [AllReduce(), thinwire.Probe(AllReduce())], ids=str)
def test_an_optimizer_for_sparse_gradients_is_refused_where_they_are_exchanged(strategy: Strategy) -> None:
    def work(comm: Comm) -> None:
        with pytest.raises(
            ConfigError, match=r"SparseAdam under .*(AllReduce|Probe).*: it takes sparse .* with LocalSGD\(\)"
        ):
            with_sparse_adam(comm, strategy)

    run_threads(2, work, timeout=10)


def test_it_is_refused_within_a_combined_one_too_and_for_one_elastic_worker() -> None:
    model = nn.Sequential(table(), nn.Linear(2, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    both = thinwire.CombinedOptimizer(sparse, torch.optim.SGD(model[1].parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="SparseAdam under AllReduce"):
        run_threads(2, lambda comm: thinwire.attach(model, both, AllReduce(), comm=comm))
    with pytest.raises(ConfigError, match="SparseAdam under AllReduce"):
        thinwire.attach(model, both, AllReduce(), elastic=True)


@pytest.mark.parametrize(("strategy", "size"), [(AllReduce(), 1), (LocalSGD(2), 2), (DiLoCo(period=2), 2)], ids=str)
def test_it_trains_where_gradients_stay_with_the_worker(strategy: Strategy, size: int) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = with_sparse_adam(comm, strategy)
        before = flat(worker.model)
        for step in range(4):
            worker.optimizer.zero_grad()
            backward(worker, comm.rank, step)
            worker.optimizer.step()
        return before, flat(worker.model)

    found = run_threads(size, work, timeout=10)
    assert all(torch.equal(x, found[0][1]) and not torch.equal(x, before) for before, x in found)


class OutOfMemory(Exception):
    """What a pass may end with."""


@pytest.mark.parametrize("failing", [[0, 1], [1]], ids=["on all ranks", "on one rank"])
def test_a_sparse_gradient_that_a_failed_pass_has_left_is_none_of_the_vector_s(failing: list[int]) -> None:
    def fail(_: Tensor) -> None:
        raise OutOfMemory

    def train(worker: Worker, weight: Tensor) -> None:
        undo = weight.register_post_accumulate_grad_hook(fail).remove if worker.comm.rank in failing else None
        try:
            backward(worker, worker.comm.rank, 2)
        except OutOfMemory:
            assert weight.grad is not None
            assert weight.grad.is_sparse
        if undo is not None:
            undo()
        with worker.consensus():
            pass
        worker.optimizer.zero_grad()
        backward(worker, 3)
        worker.optimizer.step()

    def work(comm: Comm) -> str:
        model = table()
        worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), comm=comm)
        try:
            train(worker, model.weight)
        except MismatchError as error:
            return str(error)
        return ""

    for text in run_threads(2, work, timeout=10):
        assert ("the backward pass of rank 1 was stopped by an exception" in text) == (len(failing) == 1)
