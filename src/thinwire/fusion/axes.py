"""Functions that vmap computes too, but with the models moved to the front, or with more passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.fusion.batch import Batch, Value, along, each
from thinwire.fusion.routing import Context, rule


@rule(torch.cat)
def cat(context: Context, function: Any, tensors: Sequence[Value], dim: int = 0) -> Batch:
    """Parts side by side, with the models where the largest part has them: only the others are moved."""
    dimensions = len(tensors[0].shape)
    if any(len(part.shape) != dimensions for part in tensors):
        return each(function, context.size, list(tensors), dim)
    largest = max((part for part in tensors if isinstance(part, Batch)), key=lambda part: part.tensor.numel())
    axis, place = largest.axis, dim % dimensions
    parts = [along(part, axis, context.size) for part in tensors]
    return Batch(torch.cat(parts, _physical(place, axis)), axis)


@rule(torch.amax, Tensor.amax)
def amax(
    context: Context, function: Any, input: Value, dim: int | tuple[int, ...] = (), keepdim: bool = False
) -> Batch | Tensor:
    """Each model's greatest values along axes, of which equal ones share the gradient."""
    if not isinstance(input, Batch):
        return function(input, dim, keepdim)
    dimensions = len(input.shape)
    if not dimensions:
        return input
    asked = dim if isinstance(dim, Sequence) else (dim,)
    places = sorted({place % dimensions for place in asked} or range(dimensions))
    axes = [_physical(place, input.axis) for place in places]
    if _is_plain(input.tensor):
        found = _Greatest.apply(input.tensor, axes)
        found = found if keepdim else found.squeeze(axes)
    else:
        found = input.tensor.amax(axes, keepdim)
    return Batch(found, input.axis if keepdim else input.axis - sum(place < input.axis for place in places))


def _physical(place: int, axis: int) -> int:
    """Where an axis of one model is, beside that of the models."""
    return place + (place >= axis)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


class _Greatest(torch.autograd.Function):
    """`amax`, whose way back neither widens truth values to whole numbers nor divides at every place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[int]) -> Tensor:
        """Axes are kept."""
        found = x.amax(axes, keepdim=True)
        ctx.save_for_backward(x, found)
        ctx.axes = axes
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """To the places of the greatest values, in equal shares."""
        x, found = ctx.saved_tensors
        with torch.no_grad():
            there = torch.eq(x, found, out=torch.empty_like(x))
            shares = there.sum(ctx.axes, keepdim=True)
        each_gets = gradients[0] / shares
        return there * each_gets if torch.is_grad_enabled() else there.mul_(each_gets), None
