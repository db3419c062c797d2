# SPDX-License-Identifier: Apache-2.0
"""Connect the ranks of a run through PyTorch's process group."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm
from thinwire.core.comm.rendezvous import init_process_group, started_by_torchrun
from thinwire.errors import ConfigError
from thinwire.lab.runs.settings import Settings

# The other ranks wait in the control group while rank 0 evaluates, which may take long.
_CONTROL_TIMEOUT = 3600.0


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
        init_process_group(torch.device(settings.device), settings.timeout)
    try:
        yield GroupComm(timeout=settings.timeout), GroupComm(timeout=_CONTROL_TIMEOUT)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
