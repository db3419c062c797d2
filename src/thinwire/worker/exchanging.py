# SPDX-License-Identifier: Apache-2.0
"""The gradient exchange of a worker: hooked to the backward pass, and taken off when another strategy goes on."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel

from thinwire.strategies.base import codecs_of, nested
from thinwire.worker.attachment import workers_beside
from thinwire.worker.buckets import Backward, ScaledResiduals, cut
from thinwire.worker.state import WorkerState


def watch_gradients(worker: WorkerState) -> None:
    """Hook the exchange of the worker's strategy to the backward pass, in place of the one before."""
    strategy = worker.strategy
    stop_watching(worker)
    worker.backward = None
    if not strategy.traits.sends_gradients or (worker.comm.size == 1 and worker.survives is None):
        return
    buckets = [
        bucket
        for replica, (parameters, segments) in zip(worker.replicas, worker.layouts, strict=True)
        for bucket in cut(replica, parameters, segments, worker.bucket_bytes)
    ]
    names = {
        id(p): segment.name
        for parameters, segments in worker.layouts
        for p, segment in zip(parameters, segments, strict=True)
    }
    coded = any(True for each in nested(strategy) for _ in codecs_of(each))

    worker.backward = Backward(
        buckets,
        strategy.on_gradient,
        [names[id(p)] for bucket in buckets for p in bucket.parameters],
        find_unused=worker.find_unused,
        skips_steps=strategy.traits.skips_steps,
        raises_own=worker.nonfinite == "raise",
    )
    worker.backward.survives, worker.backward.on_begin = worker.survives, worker.start_step
    if not isinstance(worker.model, DistributedDataParallel):  # where the attribute is set to turn DDP's exchange off
        worker.backward.model = worker.model
    if not strategy.traits.skips_steps and worker.survives is None:
        others = [other.backward for other in workers_beside(worker) if other.survives is None]
        worker.backward.passes = next((other.passes for other in others if other is not None), worker.backward.passes)
    if coded and worker.scaler is not None and worker.scaler.is_enabled():
        worker.backward.residuals = ScaledResiduals(worker.replicas, worker.scaler)
    for bucket in buckets:
        bucket.keeps = worker.survives is not None
    worker.watching += worker.backward.watch()


def stop_watching(worker: WorkerState) -> None:
    """Remove the hooks of the exchange."""
    while worker.watching:
        worker.watching.pop().remove()
    if worker.backward is not None:
        worker.backward.passes.leave(worker.backward)
