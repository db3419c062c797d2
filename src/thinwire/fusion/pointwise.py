"""Convolutions with filters of one place: products of each model's weights with the channels at every place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.fusion.batch import Batch, Value, along, dense

Steps = int | tuple[int, ...]


def is_pointwise(weight: Value, stride: Steps, padding: Steps | str, groups: int) -> bool:
    """Whether a convolution looks at one place at a time, at every place, and at all channels."""
    whole = all(length == 1 for length in weight.shape[2:])
    return whole and groups == 1 and padding != "same" and _all(stride, 1) and (padding == "valid" or _all(padding, 0))


def of_each(steps: Steps, axes: int) -> tuple[int, ...]:
    """A number for each axis of places, where one may stand for all."""
    return (steps,) * axes if isinstance(steps, int) else tuple(steps) * (axes // len(steps))


def _all(steps: Steps | str, wanted: int) -> bool:
    return all(step == wanted for step in (steps if isinstance(steps, tuple) else (steps,)))


def pointwise(size: int, input: Value, weight: Batch, bias: Value | None) -> Batch:
    """Each model's product at every place; an input that is shared is read once for every model, where it is.

    Args:
        size: the number of models.
        input: [n, channels, places...] of one model.
        weight: [filters, channels, 1...] of one model.
        bias: [filters] of one model.
    """
    shared = isinstance(input, Tensor)
    x, axis = (input.contiguous().expand(size, *input.shape), 0) if shared else dense(input)
    shift = None if bias is None else along(bias, 0, size)
    return Batch(_multiply(x, weight.at(0).flatten(2), shift, axis), axis)


def _multiply(x: Tensor, weight: Tensor, shift: Tensor | None, axis: int) -> Tensor:
    """Products of [models, filters, channels] with [models, n, channels, places...], or with samples first, as x is.

    And [models, filters] added; the models of x are along `axis`.
    """
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or x.dtype not in (torch.float32, torch.float64):
        found = _beside(weight, axis) @ x.flatten(3)
        found = found if shift is None else found + _beside(shift, axis).unsqueeze(-1)
        return found.unflatten(3, x.shape[3:])
    return _Products.apply(x, weight, shift, axis)


def _beside(value: Tensor, axis: int) -> Tensor:
    """[models, ...] beside what has its models along `axis` and samples along the other."""
    return value if axis else value.unsqueeze(1)


class _Products(torch.autograd.Function):
    """Products into their place, a sample or a model at a time: no weights are repeated, and nothing is moved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None, axis: int) -> Tensor:
        """Keep what the products of the way back need."""
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        return _into_place(x, weight, shift, axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Products again; differentiable once more."""
        gradient, (x, weight), axis = gradients[0].contiguous(), ctx.saved_tensors, ctx.axis
        if not torch.is_grad_enabled():
            return *_back(gradient, x, weight, axis, ctx.needs_input_grad), None
        rows, columns = gradient.flatten(3), x.flatten(3)
        of_x = (_beside(weight.transpose(1, 2), axis) @ rows).view_as(x)
        of_weight = (rows @ columns.transpose(2, 3)).sum(1 - axis)
        return of_x, of_weight, rows.sum((1 - axis, 3)) if ctx.needs_input_grad[2] else None, None


def _into_place(x: Tensor, weight: Tensor, shift: Tensor | None, axis: int) -> Tensor:
    """Where x has its samples first, sample by sample, else model by model."""
    found = x.new_empty(*x.shape[:2], weight.shape[1], *x.shape[3:])
    added = None if shift is None else shift.unsqueeze(2)
    for place, (one, into) in enumerate(zip(x.flatten(3), found.flatten(3), strict=True)):
        own, moved = weight, added
        if axis == 0:
            own, moved = weight[place].expand(len(one), -1, -1), None if added is None else added[place]
        if moved is None:
            torch.bmm(own, one, out=into)
        else:
            torch.baddbmm(moved, own, one, out=into)
    return found


def _back(
    gradient: Tensor, x: Tensor, weight: Tensor, axis: int, asked: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """What a gradient is for all three, sample by sample or model by model, while each is in the caches."""
    of_x = x.new_empty(x.shape) if asked[0] else None
    of_weight = weight.new_zeros(weight.shape) if asked[1] else None
    of_shift = weight.new_zeros(weight.shape[:2]) if asked[2] else None
    back = weight.transpose(1, 2)
    for place, (above, one) in enumerate(zip(gradient.flatten(3), x.flatten(3), strict=True)):
        if of_x is not None:
            own = back if axis else back[place].expand(len(above), -1, -1)
            torch.bmm(own, above, out=of_x[place].flatten(2))
        if of_weight is not None and axis:
            of_weight.baddbmm_(above, one.transpose(1, 2))
        elif of_weight is not None:
            of_weight[place].addbmm_(above, one.transpose(1, 2))
        if of_shift is not None:
            (of_shift if axis else of_shift[place]).add_(above.sum(2 if axis else (0, 2)))
    return of_x, of_weight, of_shift
