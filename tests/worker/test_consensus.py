# SPDX-License-Identifier: Apache-2.0
"""The consensus model and its buffers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batches, drawn, flat, steps
from tests.problems import Irregular
from thinwire import AllReduce, Comm, Gossip, Local, LocalSGD, PushSum, SlowMo, Strategy, run_threads
from thinwire.replica.replica import Replica

STRATEGIES = [
    AllReduce(),
    Local(),
    LocalSGD(4),
    Gossip(),
    Gossip(order="after"),
    PushSum(),
    PushSum(Irregular()),
    SlowMo(Gossip(), period=4),
    SlowMo(PushSum(Irregular()), period=4),
]


def normed() -> nn.Sequential:
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_the_consensus_of_workers_that_average_is_their_mean(strategy: Strategy) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, bool]:
        worker = steps(attach(comm, strategy), batches(comm.rank, 7))
        before = flat(worker.model)
        with worker.consensus() as model:
            agreed = flat(model)
            assert model is worker.model
        return before, agreed, torch.equal(before, flat(worker.model))

    found = run_threads(3, work)
    assert all(restored for *_, restored in found)
    assert all(torch.equal(agreed, found[0][1]) for _, agreed, _ in found)
    if "Irregular" not in repr(strategy):
        torch.testing.assert_close(found[0][1], torch.stack([own for own, *_ in found]).mean(0))


def test_an_error_during_evaluation_still_puts_everything_back() -> None:
    def work(comm: Comm) -> bool:
        worker = steps(attach(comm, Local(), model=normed()), batches(comm.rank, 3))
        before = [x.clone() for x in worker.model.state_dict().values()]
        with pytest.raises(ZeroDivisionError), worker.consensus():
            _ = 1 / 0
        return all(torch.equal(x, y) for x, y in zip(before, worker.model.state_dict().values(), strict=True))

    assert run_threads(2, work) == [True, True]


class Halfway(Strategy):
    """Fails while it computes the consensus."""

    def consensus(self, r: Replica) -> Tensor:
        if r.x.dtype == torch.float64:
            raise ZeroDivisionError
        return torch.zeros_like(r.x)


def test_an_error_on_the_way_to_the_consensus_puts_everything_back() -> None:
    model = drawn(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2).double()))
    worker = attach(None, Halfway(), model=model)
    before = flat(model)
    with pytest.raises(ZeroDivisionError), worker.consensus():
        pytest.fail("there is no consensus")
    assert torch.equal(before, flat(model))


def test_batch_statistics_are_each_worker_s_own_and_averaged_in_the_consensus() -> None:
    def work(comm: Comm) -> tuple[Tensor, ...]:
        worker = steps(attach(comm, AllReduce(), model=normed()), batches(comm.rank, 4))
        norm = worker.model[1]
        own, seen = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        with worker.consensus():
            shared, shared_seen = norm.running_mean.clone(), norm.num_batches_tracked.clone()
        assert torch.equal(own, norm.running_mean)
        return own, shared, seen, shared_seen

    found = run_threads(3, work)
    assert not torch.equal(found[0][0], found[1][0])
    mean = torch.stack([own for own, *_ in found]).mean(0)
    for _, shared, seen, shared_seen in found:
        torch.testing.assert_close(shared, mean)
        assert seen == shared_seen == 4


def test_counters_in_the_consensus_are_those_of_rank_zero() -> None:
    def work(comm: Comm) -> tuple[int, int]:
        model = normed()
        worker = attach(comm, Local(), model=model)
        model[1].num_batches_tracked.fill_(10 + comm.rank)
        with worker.consensus():
            shared = int(model[1].num_batches_tracked)
        return shared, int(model[1].num_batches_tracked)

    assert run_threads(2, work) == [(10, 10), (10, 11)]


def test_batch_statistics_are_not_sent_while_training() -> None:
    def work(comm: Comm) -> float:
        worker = attach(comm, AllReduce(), model=normed())
        before = comm.meter.payload_bytes
        steps(worker, batches(comm.rank, 3))
        return comm.meter.payload_bytes - before

    trained = sum(p.numel() for p in normed().parameters())
    assert run_threads(2, work) == [3 * 4 * trained] * 2
