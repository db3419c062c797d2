# SPDX-License-Identifier: Apache-2.0
"""Start workers from flat vectors that hold rank 0's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from thinwire.comm.pending import PendingMeans
from thinwire.replica.flat import flatten, lay_out, views
from thinwire.replica.moments import Moments
from thinwire.replica.replica import Replica
from thinwire.replica.shards import Shards, is_sharded, local
from thinwire.strategies.base import gradient_buffer
from thinwire.tensor2d.mesh import Mesh3D
from thinwire.worker.aliases import check_aliases
from thinwire.worker.buffers import broadcast_others
from thinwire.worker.compatibility import check_start
from thinwire.worker.handshake import equal_on_all
from thinwire.worker.parameters import learning_rate, vectors_of
from thinwire.worker.state import WorkerState


def start(worker: WorkerState, init: Literal["broadcast", "own"]) -> None:
    """The parameters of the first step, and the strategy's state."""
    if init == "broadcast":
        broadcast(worker)
    else:
        equals = [equal_on_all(worker.comm, replica.x) for replica in worker.replicas]
        check_start(worker.strategy, equal=all(equals))
        for replica in worker.replicas:
            replica.equal_start = all(equals)
    with torch.no_grad():
        for replica in worker.replicas:
            worker.strategy.start(replica)


def broadcast(worker: WorkerState) -> None:
    """Start every rank from rank 0's parameters (frozen ones too) and buffers."""
    with torch.no_grad():
        for replica in worker.replicas:
            worker.comm.broadcast_(replica.x, 0).wait()
        worker.shards.write()
        broadcast_others(worker)


def make_replicas(worker: WorkerState, named: Mapping[str, nn.Parameter], mesh: Mesh3D | None) -> None:
    """Copy the parameters into flat vectors, and let each parameter be a view of its vector.

    Raises:
        ConfigError: on all ranks, where a parameter would be untied from a tensor in the same memory.
    """
    check_aliases(worker.model, named)
    names = {id(p): name for name, p in named.items()}
    sharded: list[tuple[Tensor, Tensor]] = []
    # One for all replicas: a step is skipped by all of them or by none.
    means = PendingMeans()
    for parameters in vectors_of(worker.model, named, mesh):
        segments = lay_out([(names[id(p)], local(p)) for p in parameters])
        x = flatten([local(p) for p in parameters], segments)
        for parameter, view in zip(parameters, views(x, segments), strict=True):
            if is_sharded(parameter):
                # Its storage belongs to FSDP2; its part of the vector is copied back and forth instead.
                sharded.append((parameter, view))
            else:
                parameter.data = view
        g = gradient_buffer(worker.strategy, x)
        lr = learning_rate(worker.optimizer, parameters, segments, x)
        moments = Moments(worker.optimizer, parameters, segments)
        replica = Replica(
            x, g, worker.comm, lr=lr, seed=worker.seed, segments=segments, moments=moments, pending_means=means
        )
        worker.replicas.append(replica)
        worker.layouts.append((parameters, segments))
    worker.shards = Shards(worker.model, sharded)
