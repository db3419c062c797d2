# SPDX-License-Identifier: Apache-2.0
"""Connect the ranks of a run through PyTorch's process group, or over a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from thinwire.core.comm.base import Comm
from thinwire.core.comm.group import GroupComm
from thinwire.core.comm.rendezvous import init_process_group, started_by_torchrun
from thinwire.elastic.fleet import fleet_in_bucket
from thinwire.errors import ConfigError
from thinwire.lab.runs.recipes import parse_recipe
from thinwire.lab.runs.settings import Settings
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.compatibility import check_carried

# The other ranks wait in the control group while rank 0 evaluates, which may take long.
_CONTROL_TIMEOUT = 3600.0


class Ranks(NamedTuple):
    """The ranks of a run.

    Attributes:
        comm: for training.
        control: for everything else.
        publish: lets `thinwire watch` show what a function returns; None outside buckets.
    """

    comm: Comm
    control: Comm
    publish: Callable[[Callable[[], str]], None] | None = None


@contextmanager
def in_bucket(settings: Settings, url: str) -> Generator[Ranks]:
    """Enter the run at a URL as one of its workers.

    Raises:
        ConfigError: the settings have something that a bucket does not carry, or the store or the key cannot be used.
        CommError: the store cannot be reached, or not all workers arrived.
    """
    recipe = parse_recipe(settings.strategy, imports=False)
    if not isinstance(recipe, Strategy):
        raise ConfigError(
            f"--strategy {settings.strategy} with --rendezvous: PyTorch's own methods need a process group. Use a "
            "strategy with rounds, such as DiLoCo(period=100)"
        )
    fleet, _ = fleet_in_bucket(url, workers=settings.workers, timeout=settings.timeout)
    try:
        check_carried(recipe, fleet.request_seconds)
    except ConfigError:
        fleet.withdraw()
        raise
    comm = fleet.connect(settings.timeout)
    try:
        control = comm.duplicate()
        control.timeout = _CONTROL_TIMEOUT
        yield Ranks(comm, control, fleet.publish)
    finally:
        comm.disconnect()


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
        raise ConfigError(f"workers={settings.workers}: {size} processes were started. Start as many as workers")
    if own:
        init_process_group(torch.device(settings.device), settings.timeout)
    try:
        yield GroupComm(timeout=settings.timeout), GroupComm(timeout=_CONTROL_TIMEOUT)
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
