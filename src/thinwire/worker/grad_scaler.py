# SPDX-License-Identifier: Apache-2.0
"""GradScaler, where each worker has its own gradients: all workers skip the same steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.worker.state import WorkerState


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
    # GradScaler has no hook for this; its sharded subclass overrides the same private method.
    unscale, device = scaler._unscale_grads_, worker.replicas[0].x.device  # pyright: ignore[reportPrivateUsage]

    def unscale_together(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
        if optimizer is not worker.optimizer:
            return found
        none = torch.zeros((), dtype=torch.float32, device=device)
        overflows = sum((each.to(device) for each in found.values()), none)
        return {device: worker.comm.all_reduce_(overflows).wait()}

    def restore() -> None:
        scaler._unscale_grads_ = unscale  # pyright: ignore[reportPrivateUsage]

    scaler._unscale_grads_ = unscale_together  # pyright: ignore[reportPrivateUsage]
    worker.undo.callback(restore)


def _unscale_before_step(worker: WorkerState) -> None:
    """Keep a scaler from leaving the gradient scaled for a fused optimizer, where the strategy reads it first."""
    optimizer = worker.optimizer
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer._step_supports_amp_scaling = False  # pyright: ignore[reportAttributeAccessIssue]
        worker.undo.callback(setattr, optimizer, "_step_supports_amp_scaling", True)
