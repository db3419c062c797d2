# SPDX-License-Identifier: Apache-2.0
"""Messages between real processes, and the asynchronous strategies over them."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.engine import attach, batches, steps
from tests.methods.strategies.async_runs import CompleteBipartite
from tests.pool import run_processes, start_processes
from tests.problems import flat, quadratic, train
from thinwire import Comm, CommError, GroupComm, PeerLostError, Strategy
from thinwire.asynchronous.ad_psgd import ADPSGD
from thinwire.core.comm.mailbox.base import Message
from thinwire.methods.strategies.push_sum.eager_push_sum import EagerPushSum

DOUBLE = torch.float64


class Owner:
    """The object that a mailbox belongs to."""


def exchange(comm: Comm) -> list[Any]:
    """Messages in every direction, some of them handled, and the bytes of all."""
    owner, others = Owner(), [rank for rank in range(comm.size) if rank != comm.rank]
    box = comm.open_mailbox(owner, torch.zeros(50_000))
    before = comm.meter.payload_bytes

    def twice(message: Message) -> bool:
        box.send(message.src, 2 * message.content)
        return True

    box.on_message(1, twice, like=torch.zeros(3), src=others)
    for rank in others:
        box.send(rank, torch.full((50_000,), float(comm.rank)))
    found: list[Any] = [float(box.expect(rank, torch.zeros(50_000)).wait().content.sum()) for rank in others]
    comm.all_reduce_(torch.zeros(1)).wait()
    for rank in others:
        box.send(rank, torch.arange(3.0) + comm.rank, topic=1)
    found += [box.expect(rank, torch.zeros(3)).wait().content.tolist() for rank in others]
    comm.all_reduce_(torch.zeros(1)).wait()
    box.process_deferred()
    sent = comm.meter.payload_bytes - before
    comm.close_mailbox(owner)
    return [found, sent]


def exchange_as_a_process() -> tuple[bool, list[Any]]:
    fresh = "zmq" not in sys.modules
    return fresh, exchange(GroupComm(timeout=10))


def test_processes_and_threads_exchange_the_same_messages_and_count_them_alike() -> None:
    processes = run_processes(3, exchange_as_a_process)
    assert [found for _, found in processes] == thinwire.run_threads(3, exchange)
    assert all(fresh for fresh, _ in processes)  # nothing imports ZeroMQ until messages are sent


def wait_for_a_dead_rank() -> str:
    comm, owner = GroupComm(timeout=15), Owner()
    box = comm.open_mailbox(owner, torch.zeros(10))
    if dist.get_rank() == 1:
        box.send(0, torch.zeros(10))
        box.expect(0, torch.zeros(10)).wait()  # its own has arrived then: messages that are still queued would be lost
        os._exit(0)
    box.expect(1, torch.zeros(10)).wait()
    box.send(1, torch.zeros(10))
    with pytest.raises(PeerLostError) as lost:
        box.expect(1, torch.zeros(10)).wait()
    with pytest.raises(CommError):
        for _ in range(10):
            box.send(1, torch.zeros(10))
    box.close()
    return str(lost.value)


def test_a_process_that_ends_is_named_before_the_timeout() -> None:
    survivor, dead = start_processes(2, wait_for_a_dead_rank)
    deadline = time.monotonic() + 30
    for worker in (survivor, dead):
        worker.finish(deadline)
    assert survivor.error is None, survivor.error
    assert survivor.result == "rank 0, step 0, messages: rank 1 is lost (the connection to rank 1 was closed)"


def conserve(strategy: Strategy, lr: float) -> tuple[list[float], list[float], list[float]]:
    """The mean at first, and at consensus after steps at uneven speeds, in the middle and at the end."""
    comm = GroupComm(timeout=20)
    starts = torch.randn(comm.size, 400, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    seen: list[list[float]] = []

    def observe(worker: thinwire.Worker) -> None:
        time.sleep(0.003 * ((comm.rank + worker.step) % 3))
        if worker.step % 15 == 0:
            with worker.consensus() as model:
                seen.append(flat(model).tolist())

    problem = quadratic(comm.size, DOUBLE, width=400)
    worker = train(comm, strategy, problem, [lr] * 30, starts=starts, after_step=observe)
    comm.close_mailbox(worker.replicas[0])
    return starts.mean(0).tolist(), *seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size"), [(ADPSGD(CompleteBipartite()), 4), (EagerPushSum(staleness=2), 5)], ids=["ad_psgd", "eager"]
)
def test_processes_at_uneven_speeds_keep_the_mean(strategy: Strategy, size: int) -> None:
    for mean, middle, end in run_processes(size, conserve, strategy, 0.0):
        assert torch.allclose(torch.tensor(middle), torch.tensor(mean), rtol=0, atol=1e-12)
        assert torch.allclose(torch.tensor(end), torch.tensor(mean), rtol=0, atol=1e-12)


def learn(folder: str) -> dict[str, tuple[float, float, float]]:
    """The loss at consensus before, after some steps, and after a checkpoint was read back."""
    found: dict[str, tuple[float, float, float]] = {}
    for strategy in (ADPSGD(), EagerPushSum()):
        worker = attach(None, strategy, timeout=20)
        rank = worker.comm.rank
        data = batches(rank, 5)

        def loss(worker: thinwire.Worker = worker) -> float:
            with worker.consensus() as model, torch.no_grad():
                return sum(float((model(x) - y).square().mean()) for rank in range(2) for x, y in batches(rank, 5))

        before = loss()
        steps(worker, data * 6)
        after = loss()
        worker.save(f"{folder}/{type(strategy).__name__}")
        steps(worker, data)
        worker.load(f"{folder}/{type(strategy).__name__}")
        again = loss()
        steps(worker, data)
        worker.detach()
        worker.comm.close_mailbox(worker.replicas[0])
        found[type(strategy).__name__] = (before, after, again)
    return found


def test_processes_learn_and_resume(tmp_path: Any) -> None:
    for found in run_processes(2, learn, str(tmp_path)):
        for before, after, again in found.values():
            assert after < 0.95 * before
            assert again == after
