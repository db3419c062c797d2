# SPDX-License-Identifier: Apache-2.0
"""The exchange around the backward pass: gradients, and whether a GradScaler skips the step.

`attach` and `switch` hook it to a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.core.torch_internals import set_unscales_itself, unscales_itself, wrap_unscale
from thinwire.methods.strategies.base import codecs_of, nested
from thinwire.worker.buckets import Backward, ScaledResiduals, cut
from thinwire.worker.guards import workers_beside
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


# -- skipped steps -----------------------------------------------------------------------------------------------------


def share_skips(worker: WorkerState) -> None:
    """Make an overflow on one rank skip the step on all ranks, as the GradScaler for sharded models does."""
    scaler, strategy = worker.scaler, worker.strategy
    if scaler is not None and scaler.is_enabled() and strategy.traits.reads_gradient:
        _unscale_before_step(worker)
    if scaler is None or worker.comm.size == 1 or worker.shares_skips:
        return
    # Where only gradients are exchanged, all ranks have the same one and find the same overflow by themselves.
    if strategy.traits.sends_gradients and not strategy.traits.reads_gradient:
        return
    worker.shares_skips = True
    device = worker.replicas[0].x.device

    def together(unscale: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
        def unscale_together(optimizer: Optimizer, *rest: Any) -> dict[torch.device, Tensor]:
            found = unscale(optimizer, *rest)
            if optimizer is not worker.optimizer:
                return found
            none = torch.zeros((), dtype=torch.float32, device=device)
            overflows = sum((each.to(device) for each in found.values()), none)
            return {device: worker.comm.all_reduce_(overflows).wait()}

        return unscale_together

    worker.undo.callback(wrap_unscale(scaler, together))


def _unscale_before_step(worker: WorkerState) -> None:
    """Keep a scaler from leaving the gradient scaled for a fused optimizer, where the strategy reads it first."""
    optimizer = worker.optimizer
    if unscales_itself(optimizer):
        set_unscales_itself(optimizer, False)
        worker.undo.callback(set_unscales_itself, optimizer, True)
