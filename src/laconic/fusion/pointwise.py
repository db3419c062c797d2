"""Convolutions with filters of one place: products of each model's weights with the channels at every place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.fusion.batch import Batch, Value, along, dense

Steps = int | tuple[int, ...]


def is_pointwise(weight: Value, stride: Steps, padding: Steps | str, groups: int) -> bool:
    """Whether a convolution looks at one place at a time, at every place, and at all channels."""
    whole = all(length == 1 for length in weight.shape[2:])
    return whole and groups == 1 and padding != "same" and _all(stride, 1) and (padding == "valid" or _all(padding, 0))


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
        of_x, of_weight, of_shift = ctx.needs_input_grad[:3]
        back, rows, columns = weight.transpose(1, 2), gradient.flatten(3), x.flatten(3)
        if torch.is_grad_enabled():
            of_input = (_beside(back, axis) @ rows).view_as(x)
            of_filters = (rows @ columns.transpose(2, 3)).sum(1 - axis)
        else:
            of_input = _into_place(gradient, back, None, axis) if of_x else None
            of_filters = _over_samples(rows, columns, axis) if of_weight else None
        return of_input, of_filters, rows.sum((1 - axis, 3)) if of_shift else None, None


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


def _over_samples(gradient: Tensor, x: Tensor, axis: int) -> Tensor:
    """[models, filters, channels]: the products of every sample, added up."""
    total = x.new_zeros(x.shape[axis], gradient.shape[2], x.shape[2])
    for one, own in zip(gradient.unbind(1 - axis), x.unbind(1 - axis), strict=True):
        total.baddbmm_(one, own.transpose(1, 2))
    return total
