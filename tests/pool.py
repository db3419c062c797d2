# SPDX-License-Identifier: Apache-2.0
"""Real worker processes for tests, cheaply: torch is imported once, every rank is a fork of that."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

context = multiprocessing.get_context("forkserver")
# Optimizers import torch._dynamo when they are made, which costs half a second.
context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed",
        "pytest",
        "hypothesis",
        "thinwire.worker.attach",
        "thinwire.methods.strategies.recipe",
        "tests.pool",
    ]
)


class RankProcess:
    """One rank: its process and the pipe its result comes back on."""

    def __init__(
        self,
        work: Callable[..., Any],
        rank: int,
        size: int,
        port: int,
        listener: socket.socket | None,
        seconds: float,
        arguments: Any,
    ) -> None:
        self.rank = rank
        self.inbox, outbox = context.Pipe(duplex=False)
        self.process = context.Process(
            target=_main, args=(outbox, work, rank, size, port, listener, seconds, arguments)
        )
        self.process.start()
        outbox.close()
        self.result: Any = None
        self.error: str | None = None

    def finish(self, deadline: float) -> None:
        """Collect the result, or what went wrong; nothing outlives this."""
        try:
            if self.inbox.poll(max(0.0, deadline - time.monotonic())):
                self.result, self.error = pickle.loads(self.inbox.recv_bytes())
            else:
                self.error = "no answer before the deadline"
        except EOFError:
            self.error = "ended without an answer"
        self.process.join(max(0.1, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.inbox.close()


def start_processes(
    size: int, work: Callable[..., Any], *arguments: Any, group_seconds: float = 20.0
) -> list[RankProcess]:
    """Start `work(*arguments)` on `size` ranks of a Gloo group over loopback; `work` is a module-level function."""
    # Bound here and inherited by rank 0, so that nobody else can take the port before its store listens.
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        return [
            RankProcess(work, rank, size, port, None if rank else listener, group_seconds, arguments)
            for rank in range(size)
        ]


def run_processes(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> list[Any]:
    """Run to the end and return the results in the order of ranks; the first failure is raised with its traceback."""
    workers = start_processes(size, work, *arguments)
    deadline = time.monotonic() + seconds
    for worker in workers:
        worker.finish(deadline)
    failed = [f"rank {w.rank}: {w.error}" for w in workers if w.error]
    assert not failed, "\n".join(failed)
    return [worker.result for worker in workers]


def _main(
    outbox: Connection,
    work: Callable[..., Any],
    rank: int,
    size: int,
    port: int,
    listener: socket.socket | None,
    seconds: float,
    arguments: Any,
) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=seconds)
        descriptor = None if listener is None else listener.detach()
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            size,
            is_master=rank == 0,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        # Whole tensors: the pipe's own way would share memory with a process that ends.
        outbox.send_bytes(pickle.dumps((work(*arguments), None)))
    except BaseException:
        outbox.send_bytes(pickle.dumps((None, traceback.format_exc())))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
