# SPDX-License-Identifier: Apache-2.0
"""Workers find each other by the variables that torchrun sets, without a process group of the caller's."""

import multiprocessing
import os
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from thinwire.emulate.rendezvous import free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", "thinwire.worker.worker"])


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
    pipes = [_context.Pipe(duplex=False) for _ in ranks]
    processes = [
        _context.Process(target=_work, args=(outbox, rank, size, port, timeout))
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
