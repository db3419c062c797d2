# SPDX-License-Identifier: Apache-2.0
"""The norm of a model's whole gradient, and clipping by it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from thinwire.tensor2d.mesh import Mesh2D
from thinwire.tensor2d.module import placed
from thinwire.tensor2d.products import accumulation_dtype


@torch.no_grad()
def gradient_norm(model: nn.Module, mesh: Mesh2D) -> Tensor:
    """Return the Euclidean norm of the whole gradient, the same on all ranks, in fp32 at least.

    Parameters that are replicated over the rows are counted in the first row only; tied parameters are counted once.

    Args:
        model: a model on the mesh.
        mesh: the ranks.
    """
    counted = [
        parameter.grad
        for parameter, placement in placed(model).values()
        if parameter.grad is not None and not (placement.replicated and mesh.row > 0)
    ]
    first = next(model.parameters())
    # A rank without counted gradients adds zero, because the all-reduces need every rank.
    total = torch.zeros(1, dtype=accumulation_dtype(first.dtype), device=first.device)
    for grad in counted:
        total += grad.to(total.dtype).square().sum()
    # Rows first, then columns: every rank adds in the same order and gets the same bits.
    mesh.along_row.all_reduce_(total).wait()
    mesh.along_column.all_reduce_(total).wait()
    return total.sqrt().squeeze(0)


@torch.no_grad()
def clip_gradient_norm_(model: nn.Module, max_norm: float, mesh: Mesh2D) -> Tensor:
    """Scale the gradient to a norm of at most `max_norm` over the whole mesh; return the original norm.

    The result is that of `torch.nn.utils.clip_grad_norm_` on the serial model.

    Args:
        model: a model on the mesh.
        max_norm: the largest norm of the whole gradient.
        mesh: the ranks.
    """
    norm = gradient_norm(model, mesh)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm
