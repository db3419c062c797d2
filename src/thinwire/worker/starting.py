"""Where workers start: at rank 0's parameters and buffers."""

from __future__ import annotations

import torch

from thinwire.replica.flat import copy_each_, flatten, lay_out, views
from thinwire.replica.shards import local
from thinwire.worker.parameters import by_kind
from thinwire.worker.state import WorkerState


def broadcast(worker: WorkerState) -> None:
    """Start every rank from rank 0's parameters (frozen ones too) and buffers."""
    comm = worker.comm
    with torch.no_grad():
        for replica in worker.replicas:
            comm.broadcast_(replica.x, 0).wait()
        worker.shards.write()
        flat = {id(p) for parameters, _ in worker.layouts for p in parameters}
        rest = [local(t.data) for t in worker.model.parameters() if id(t) not in flat]
        rest += list(worker.model.buffers())
        for group in by_kind(rest).values():
            vector = flatten(group, layout := lay_out([("", t) for t in group]))
            comm.broadcast_(vector, 0).wait()
            copy_each_(group, views(vector, layout))
