# SPDX-License-Identifier: Apache-2.0
"""The gradient exchange of a worker: hooked to the backward pass, and taken off when another strategy goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.comm.work import Work
from thinwire.replica.replica import Replica
from thinwire.strategies.base import codecs_of, nested
from thinwire.worker.attachment import workers_beside
from thinwire.worker.buckets import Backward, cut
from thinwire.worker.handshake import sum_of_bits
from thinwire.worker.scaled_residuals import ScaledResiduals
from thinwire.worker.state import WorkerState

_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"
_ALLOCATING = (("torch.distributed.optim.named_optimizer", "init_state"),)


def watch_gradients(worker: WorkerState) -> None:
    """Hook the exchange of the worker's strategy to the backward pass, in place of the one before."""
    strategy = worker.strategy
    while worker.watching:
        worker.watching.pop().remove()
    if worker.backward is not None:
        worker.backward.passes.leave(worker.backward)
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
    scaled = worker.scaler is not None and worker.scaler.is_enabled()

    def exchange(replica: Replica, part: slice) -> Work[Tensor] | None:
        if worker.own_gradient is not None:
            worker.own_gradient += sum_of_bits(replica.g[part])
        return strategy.on_gradient(replica, part)

    worker.backward = Backward(
        buckets,
        exchange,
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
    if coded and scaled:
        worker.backward.residuals = ScaledResiduals(worker.replicas, worker.scaler)
    for bucket in buckets:
        bucket.keeps = worker.survives is not None
    worker.watching += worker.backward.watch()


def register_hooks(worker: WorkerState, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Hook the exchange to the backward pass, and the worker's hooks to the optimizer's step; `undo` removes them."""
    watch_gradients(worker)
    worker.undo.callback(_stop_watching, worker)
    steps = _Steps(before, after)
    worker.undo.callback(worker.optimizer.register_step_pre_hook(steps.before).remove)
    worker.undo.callback(worker.optimizer.register_step_post_hook(steps.after).remove)


def _stop_watching(worker: WorkerState) -> None:
    for handle in worker.watching:
        handle.remove()
    if worker.backward is not None:
        worker.backward.passes.leave(worker.backward)


class _Steps:
    """Hooks that run once in a step.

    Torch wraps the `step` of every class of which there has been an object. Where a subclass calls `super().step()`,
    all hooks run for both, one step within the other. Steps in which torch only allocates the optimizer's state run
    without the hooks.
    """

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._before, self._after = before, after
        self._outermost: FrameType | None = None
        self._allocates_state = False

    def before(self, optimizer: Optimizer, *given: Any) -> Any:
        """As the hook, unless a step is under way that has called this one."""
        frame = _caller()
        if _within(frame, self._outermost):
            return None
        # One that is here still has ended by an exception.
        self._outermost = frame
        self._allocates_state = _only_allocates_state(optimizer)
        return None if self._allocates_state else self._before(optimizer, *given)

    def after(self, *given: Any) -> None:
        """As the hook, at the end of the outermost step."""
        frame = _caller()
        if frame is self._outermost or not _within(frame, self._outermost):
            self._outermost = None
            if not self._allocates_state:
                self._after(*given)


def _only_allocates_state(optimizer: Optimizer) -> bool:
    """Whether torch takes this step with zero gradients and a learning rate of zero to allocate the optimizer's state.

    `get_state_dict` and `set_state_dict` of `torch.distributed.checkpoint` do so while the optimizer's state is empty.
    The state of plain SGD always is.
    """
    for group in optimizer.param_groups:
        lr = group.get("lr", 0.0)
        # Torch's zero is a scalar on the CPU; a learning rate on a GPU must not be waited for.
        if (isinstance(lr, Tensor) and (lr.ndim or lr.device.type != "cpu")) or lr != 0:
            return False
    frame = inspect.currentframe()
    while frame is not None:
        module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if (module, function) in _ALLOCATING or module == _CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def _caller() -> FrameType | None:
    """Of the function that asks: where torch calls the hooks of one step."""
    here = inspect.currentframe()
    asking = here and here.f_back
    return asking and asking.f_back


def _within(frame: FrameType | None, outer: FrameType | None) -> bool:
    """Whether a call was made in another one, which is still under way."""
    while outer is not None and frame is not None:
        frame = frame.f_back
        if frame is outer:
            return True
    return False
