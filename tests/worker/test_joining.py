# SPDX-License-Identifier: Apache-2.0
"""Uneven numbers of batches: a rank without data keeps taking part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine import Batch, Mixed, attach, batch, batches, drawn, flat, momentum, net, sgd, steps
from tests.problems import distance
from thinwire import (
    DQSGD,
    AllReduce,
    Bf16,
    Comm,
    FixedBits,
    Gossip,
    Local,
    LocalSGD,
    PushSum,
    SketchedSGD,
    SlowMo,
    Strategy,
    run_threads,
)
from thinwire.worker.step import step_without_batch
from thinwire.worker.worker import internals_of

LENGTHS = [3, 5, 4]
STRATEGIES = [
    AllReduce(),
    LocalSGD(2),
    LocalSGD(3),
    Gossip(),
    Gossip(order="after"),
    PushSum(),
    SlowMo(period=2),
    Local(),
]


def unsized(data: Iterable[Batch]) -> Iterator[Batch]:
    yield from data


def some_known(rank: int, data: list[Batch]) -> Iterable[Batch]:
    return unsized(data) if rank == 1 else data


def joined(comm: Comm, strategy: Strategy, lengths: list[int], kind: str, **settings: Any) -> tuple[Tensor, int, int]:
    worker = attach(comm, strategy, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(worker.optimizer, 2, gamma=0.5)
    data: Iterable[Batch] = batches(comm.rank, lengths[comm.rank])
    if kind != "known":
        data = unsized(data) if kind == "unknown" else some_known(comm.rank, list(data))
    seen = 0
    for x, y in worker.join(data, after_step=schedule.step):
        steps(worker, [(x, y)])
        schedule.step()
        seen += 1
    assert schedule.last_epoch == worker.step
    assert all(replica.active == comm.size for replica in worker.replicas)
    return flat(worker.model), seen, worker.step


@pytest.mark.parametrize("kind", ["known", "unknown", "partly known"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_every_rank_takes_every_step_and_sees_its_own_batches(strategy: Strategy, kind: str) -> None:
    found = run_threads(3, lambda c: joined(c, strategy, LENGTHS, kind), timeout=20)
    assert [seen for _, seen, _ in found] == LENGTHS
    assert [step for *_, step in found] == [5, 5, 5]


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_gradients_are_averaged_over_the_ranks_that_have_one(kind: str, find_unused: bool) -> None:
    found = run_threads(3, lambda c: joined(c, AllReduce(), LENGTHS, kind, find_unused=find_unused))
    assert all(torch.equal(found[0][0], x) for x, *_ in found)
    model = net()
    optimizer = momentum(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):
        optimizer.zero_grad()
        active = [rank for rank in range(3) if step < LENGTHS[rank]]
        for rank in active:
            x, y = batch(rank, step)
            ((model(x) - y).square().mean() / len(active)).backward()
        optimizer.step()
        schedule.step()
    torch.testing.assert_close(found[0][0], flat(model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "tolerance"),
    [
        (SketchedSGD(1.0, 1, momentum=0.0, dense_below=0), 1e-5),
        (DQSGD(FixedBits(8), block=8), 5e-3),
    ],
    ids=repr,
)
def test_coded_gradients_too_are_averaged_over_the_ranks_that_have_one(strategy: Strategy, tolerance: float) -> None:
    coded, exact = (
        run_threads(2, lambda c, s=each: joined(c, s, [2, 4], "known", optimizer=sgd))
        for each in (strategy, AllReduce())
    )
    assert torch.equal(coded[0][0], coded[1][0])
    assert distance(coded[0][0], exact[0][0]) < tolerance


def test_a_rank_without_any_batch_takes_part() -> None:
    for strategy in (AllReduce(), AllReduce(Bf16()), LocalSGD(2)):
        found = run_threads(3, lambda c, s=strategy: joined(c, s, [0, 2, 4], "unknown"))
        assert [seen for _, seen, _ in found] == [0, 2, 4]
        assert torch.equal(found[0][0], found[2][0])


def test_without_any_batch_no_rank_takes_a_step() -> None:
    found = run_threads(3, lambda c: joined(c, AllReduce(), [0, 0, 0], "unknown"))
    assert [step for *_, step in found] == [0, 0, 0]


def test_epochs_follow_each_other() -> None:
    def work(comm: Comm) -> tuple[Tensor, int]:
        worker = attach(comm, AllReduce())
        for epoch in range(3):
            length = 2 + (comm.rank + epoch) % 2
            for data in worker.join(batches(comm.rank, length, first=10 * epoch)):
                steps(worker, [data])
        steps(worker, batches(comm.rank, 1))
        return flat(worker.model), worker.step

    (x, step), (y, _) = run_threads(2, work)
    assert torch.equal(x, y)
    assert step == 10


def test_even_lengths_cost_one_message_and_unknown_ones_four_bytes_a_step() -> None:
    def work(comm: Comm, known: bool) -> dict[str, float]:
        worker = attach(comm, Local())
        comm.meter.by_operation.clear()
        for data in worker.join(batches(comm.rank, 4) if known else unsized(batches(comm.rank, 4))):
            steps(worker, [data])
        return comm.meter.by_operation

    assert run_threads(2, lambda c: work(c, True)) == [{"all_gather": 8.0}] * 2
    assert run_threads(2, lambda c: work(c, False)) == [{"all_gather": 8.0, "all_reduce": 5 * 4.0}] * 2


def test_leaving_the_loop_early_restores_the_mean_over_all() -> None:
    def work(comm: Comm) -> int:
        worker = attach(comm, AllReduce())
        loop = worker.join(batches(comm.rank, 1 + 2 * comm.rank))
        if comm.rank == 1:
            for index, data in enumerate(loop):
                steps(worker, [data])
                if index == 1:
                    break
            loop.close()
        else:
            steps(worker, [next(loop)])
            step_without_batch(internals_of(worker))
            loop.close()
        return worker.replicas[0].active

    assert run_threads(2, work) == [2, 2]


def test_several_dtypes_take_part() -> None:
    def work(comm: Comm) -> Tensor:
        worker = attach(comm, AllReduce(), model=drawn(Mixed()))
        for data in worker.join(batches(comm.rank, LENGTHS[comm.rank])):
            steps(worker, [data])
        return flat(worker.model)

    found = run_threads(3, work)
    assert all(torch.equal(found[0], x) for x in found)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2), PushSum()], ids=repr)
def test_scalers_stay_equal_on_ranks_without_data(strategy: Strategy) -> None:
    def work(comm: Comm) -> tuple[Tensor, float, int]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        worker = attach(comm, strategy, scaler=scaler)
        for step, (x, y) in enumerate(worker.join(batches(comm.rank, [0, 5, 2][comm.rank]))):
            steps(worker, [(x, y)], scaler=scaler, factor=lambda _, step=step: float("inf") if step == 3 else 1.0)
        return flat(worker.model), scaler.get_scale(), worker.step

    found = run_threads(3, work)
    assert [scale for _, scale, _ in found] == [8.0] * 3
    assert [step for *_, step in found] == [4] * 3
    if strategy != PushSum():
        assert all(torch.equal(found[0][0], x) for x, *_ in found)
