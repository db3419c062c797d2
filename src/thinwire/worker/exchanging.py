# SPDX-License-Identifier: Apache-2.0
"""The gradient exchange of a worker: hooked to the backward pass, and taken off when another strategy goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thinwire.strategies.base import nested
from thinwire.worker.buckets import Backward, cut
from thinwire.worker.state import WorkerState


def watch_gradients(worker: WorkerState) -> None:
    """Hook the exchange of the worker's strategy to the backward pass, in place of the one before."""
    strategy = worker.strategy
    while worker.watching:
        worker.watching.pop().remove()
    worker.backward = None
    if not strategy.sends_gradients or (worker.comm.size == 1 and worker.survives is None):
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
    worker.backward = Backward(
        buckets,
        strategy.on_gradient,
        [names[id(p)] for bucket in buckets for p in bucket.parameters],
        find_unused=worker.find_unused,
        skips_steps=strategy.skips_steps,
        coded=any(getattr(each, "codec", None) is not None for each in nested(strategy)),
        raises_own=worker.nonfinite == "raise",
    )
    worker.backward.survives = worker.survives
    for bucket in buckets:
        bucket.keeps = worker.survives is not None
    worker.watching += worker.backward.watch()


def register_hooks(worker: WorkerState, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Hook the exchange to the backward pass, and the worker's hooks to the optimizer's step; `undo` removes them."""
    watch_gradients(worker)
    worker.undo.callback(lambda: [handle.remove() for handle in worker.watching])
    worker.undo.callback(worker.optimizer.register_step_pre_hook(before).remove)
    worker.undo.callback(worker.optimizer.register_step_post_hook(after).remove)
