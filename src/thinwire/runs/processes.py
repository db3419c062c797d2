"""A rank's place in torch's process group."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from thinwire.comm.base import Comm
from thinwire.comm.group import GroupComm
from thinwire.errors import CommTimeoutError, ConfigError
from thinwire.runs.settings import Settings

# Others wait this long while rank 0 evaluates.
_PATIENCE_SECONDS = 3600.0


def started_by_torchrun() -> bool:
    """Whether this process is one of several that something like torchrun has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def joined(settings: Settings) -> Generator[tuple[Comm, Comm]]:
    """The ranks of this run as two comms: one to train with, one for everything else.

    Where the process is in a default group already, that one is used, and stays.

    Raises:
        ConfigError: another number of processes was started.
        CommTimeoutError: the others did not come.
    """
    size = _started()
    if size != settings.workers:
        raise ConfigError(f"workers={settings.workers}: {size} processes were started; start as many as workers")
    own = not dist.is_initialized()
    if own:
        patience = timedelta(seconds=settings.timeout)
        _start("cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo", patience)
    try:
        training = GroupComm(timeout=settings.timeout)
        yield training, GroupComm(timeout=_PATIENCE_SECONDS)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def _started() -> int:
    """How many processes there are, this one included."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1


def _start(backend: str, patience: timedelta) -> None:
    if not started_by_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=patience)
        return
    if "nccl" in backend:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        dist.init_process_group(backend, timeout=patience)
    except dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        first = str(error).splitlines()[0][:200]
        raise CommTimeoutError(
            f"rank {os.environ['RANK']}: the workers did not all meet at {where} ({first})"
        ) from error
