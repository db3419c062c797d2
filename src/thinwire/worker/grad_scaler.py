"""GradScaler, where gradients differ between workers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.worker.state import WorkerState


def share_skips(worker: WorkerState, scaler: torch.amp.GradScaler) -> None:
    """Let an overflow on one rank skip the step on all, as GradScaler for sharded models does."""
    check, device = scaler._unscale_grads_, worker.replicas[0].x.device  # pyright: ignore[reportPrivateUsage]

    def check_together(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = check(optimizer, inv_scale, found_inf, allow_fp16)
        if optimizer is not worker.optimizer:
            return found
        overflows = sum((each.to(device) for each in found.values()), torch.zeros((), device=device))
        return {device: worker.comm.all_reduce_(overflows).wait()}

    def restore() -> None:
        scaler._unscale_grads_ = check  # pyright: ignore[reportPrivateUsage]

    scaler._unscale_grads_ = check_together  # pyright: ignore[reportPrivateUsage]
    worker.undo.callback(restore)
