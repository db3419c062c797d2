# SPDX-License-Identifier: Apache-2.0
"""Consensus models are lent: a worker's own parameters come back, and what would be lost with them is refused."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from thinwire.worker.attachment import refuse
from thinwire.worker.buffers import average_buffers, is_writable
from thinwire.worker.parameters import named_buffers
from thinwire.worker.state import WorkerState


@contextmanager
def lends(
    worker: WorkerState, together: Callable[[Callable[[], None]], None], *, averaged: bool = False
) -> Generator[None]:
    """Put what all workers agree on in the place of this worker's own parameters and buffers, which come back.

    Args:
        worker: of this rank; every rank must enter.
        together: runs what needs all ranks, as the worker does.
        averaged: whether the parameters are the consensus already, so that only buffers are sent.
    """
    worker.shards.read()
    own = [replica.x.clone() for replica in worker.replicas]
    buffers = {name: buffer.clone() for name, buffer in named_buffers(worker.model).items()}
    worker.lent += 1
    try:
        together(lambda: _agree(worker, averaged=averaged))
        worker.shards.write()
        yield
    finally:
        worker.lent -= 1
        with torch.no_grad():
            for replica, x in zip(worker.replicas, own, strict=True):
                replica.x.copy_(x)
            worker.shards.write()
            for name, buffer in named_buffers(worker.model).items():
                # A cache may have grown, or come new, in a forward pass.
                if name in buffers and buffer.shape == buffers[name].shape and is_writable(buffer):
                    buffer.copy_(buffers[name])


def _agree(worker: WorkerState, *, averaged: bool) -> None:
    with torch.no_grad():
        if not averaged:
            for replica in worker.replicas:
                replica.x.copy_(worker.strategy.consensus(replica))
        average_buffers(worker)


def refuse_while_lent(worker: WorkerState, call: str) -> None:
    """Refuse what would save, change or train the parameters that are lent.

    Raises:
        ConfigError: on all ranks, within `consensus()`.
    """
    if worker.lent:
        refuse(
            worker,
            f"{call} within consensus(), where the model has the parameters that all workers agree on, which are only "
            "lent; leave the `with` block first",
        )
