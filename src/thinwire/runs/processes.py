"""Connect the ranks of a run through PyTorch's process group."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thinwire.comm.base import Comm
from thinwire.comm.group import GroupComm
from thinwire.errors import CommTimeoutError, ConfigError
from thinwire.runs.settings import Settings

# The other ranks wait in the control group while rank 0 evaluates, which may take long.
_CONTROL_TIMEOUT = 3600.0


def started_by_torchrun() -> bool:
    """Whether torchrun, or something that sets the same variables, started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def connected(settings: Settings) -> Generator[tuple[Comm, Comm]]:
    """Connect the ranks of a run; yields two comms, one for training and one for everything else.

    An existing default process group is used and kept.

    Raises:
        ConfigError: the number of processes is not that of workers.
        CommTimeoutError: not all workers connected in time.
    """
    own = not dist.is_initialized()
    size = (int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1) if own else dist.get_world_size()
    if size != settings.workers:
        raise ConfigError(f"workers={settings.workers}: {size} processes were started; start as many as workers")
    if own:
        # Tensors that are not training's stay on the CPU, so CUDA runs need Gloo too.
        backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
        _init_process_group(backend, timedelta(seconds=settings.timeout))
    try:
        yield GroupComm(timeout=settings.timeout), GroupComm(timeout=_CONTROL_TIMEOUT)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def _init_process_group(backend: str, timeout: timedelta) -> None:
    if not started_by_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        if _is_local(os.environ["MASTER_ADDR"]):
            store = _loopback_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, size, timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except (dist.DistError, OSError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        first = str(error).splitlines()[0][:200]
        raise CommTimeoutError(
            f"rank {os.environ['RANK']}: not all workers connected to {address} in time ({first})"
        ) from error


def _is_local(address: str) -> bool:
    """Whether rank 0 hosts the store for this machine only."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def _loopback_store(address: str, port: int, rank: int, size: int, timeout: timedelta) -> Store:
    """A store that listens on the loopback; torch's own listens on every interface, and serves anyone."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=128) if rank == 0 else None
    return TCPStore(
        address,
        port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
    )
