# SPDX-License-Identifier: Apache-2.0
"""GradScaler, where each worker has its own gradients: all workers skip the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.torch_internals import set_unscales_itself, unscales_itself, wrap_unscale
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
