# SPDX-License-Identifier: Apache-2.0
"""Workers find each other by the variables that torchrun sets, without a process group of the caller's."""

import json
import os
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore

import thinwire
from tests.pool import context
from thinwire import ThreadComm, run_threads
from thinwire.core.comm.rendezvous import start_of_ranks
from thinwire.lab.emulate.launch import free_port


def _work(outbox: Connection, rank: int, size: int, port: int, timeout: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        worker = thinwire.attach(model, optimizer, thinwire.AllReduce(), timeout=timeout)
    except thinwire.ThinwireError as error:
        outbox.send(f"{type(error).__name__}: {error}")
        return
    outbox.send((worker.comm.rank, worker.comm.size, dist.get_backend(), dist.is_initialized()))


def together(ranks: list[int], size: int, timeout: float) -> list[Any]:
    """What each of these ranks answers, and with which status it ends."""
    port = free_port()
    found: list[Any] = []
    pipes = [context.Pipe(duplex=False) for _ in ranks]
    processes = [
        context.Process(target=_work, args=(outbox, rank, size, port, timeout))
        for rank, (_, outbox) in zip(ranks, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for process, (inbox, outbox) in zip(processes, pipes, strict=True):
        outbox.close()
        found.append(inbox.recv() if inbox.poll(60) else "no answer")
        process.join(30)
        found.append(process.exitcode)
        process.kill()
        process.join()
        inbox.close()
    return found


def test_attach_makes_the_process_group_from_the_environment() -> None:
    assert together([0, 1], 2, 30.0) == [(0, 2, "gloo", True), 0, (1, 2, "gloo", True), 0]


def test_a_rank_that_never_comes_is_an_error_within_the_timeout() -> None:
    told, status = together([0], 2, 2.0)
    assert told.startswith("CommTimeoutError: rank 0: not all 2 workers connected to 127.0.0.1:")
    assert "in 2 s" in told
    assert status == 0


def starts(store: HashStore, late: float = 0.0) -> list[str]:
    """The names that three ranks agree on, of which the last comes later."""

    def work(comm: ThreadComm) -> str:
        time.sleep(late if comm.rank == 2 else 0.0)
        return start_of_ranks(store, comm.rank, 3, 20.0)

    return run_threads(3, work)


def test_each_start_of_the_ranks_gets_a_name_of_its_own() -> None:
    store = HashStore()
    names = [starts(store, late) for late in (0.0, 0.1, 0.0)]
    assert [len(set(each)) for each in names] == [1, 1, 1]
    assert len({each[0] for each in names}) == 3


def test_what_an_earlier_start_has_left_halfway_is_not_taken_for_a_rank() -> None:
    store = HashStore()
    store.set("present/1", "gone")  # of a rank that ended before the others came
    store.set("present/2", "gone")
    store.set("proposal", json.dumps(["old", "gone", "gone", "gone"]))
    store.set("old/agreed", "")
    (name,) = set(starts(store, 0.2))
    assert name != "old"


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set("present/1", "gone")
    with pytest.raises(TimeoutError, match="rank 1 did not arrive"):
        start_of_ranks(store, 0, 2, 0.1)
    with pytest.raises(TimeoutError, match="rank 0, or one that it awaits, did not arrive"):
        start_of_ranks(HashStore(), 1, 2, 0.1)
