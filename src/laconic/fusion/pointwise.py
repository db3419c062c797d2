"""Convolutions with filters of one place: products of each model's weights with the channels at every place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.fusion.batch import Batch, Value, along

Steps = int | tuple[int, ...]


def is_pointwise(weight: Value, stride: Steps, padding: Steps | str, groups: int) -> bool:
    """Whether a convolution looks at one place at a time, at every place, and at all channels."""
    whole = all(length == 1 for length in weight.shape[2:])
    return whole and groups == 1 and padding != "same" and _all(stride, 1) and (padding == "valid" or _all(padding, 0))


def _all(steps: Steps | str, wanted: int) -> bool:
    return all(step == wanted for step in (steps if isinstance(steps, tuple) else (steps,)))


def pointwise(size: int, input: Value, weight: Batch, bias: Value | None) -> Batch:
    """Each model's product at every place; on an input that is shared, the models' filters below each other.

    Args:
        size: the number of models.
        input: [n, channels, places...] of one model.
        weight: [filters, channels, 1...] of one model.
        bias: [filters] of one model.
    """
    filters = weight.at(0).flatten(2)
    shift = None if bias is None else along(bias, 0, size)
    if isinstance(input, Tensor):
        merged = None if shift is None else shift.reshape(1, -1)
        found = _multiply(input.flatten(2).unsqueeze(1), filters.reshape(1, -1, filters.shape[2]), merged)
        return Batch(found.view(len(input), size, -1, *input.shape[2:]), 1)
    found = _multiply(_in_rows(input.at(1).flatten(3)), filters, shift)
    return Batch(found.unflatten(3, input.shape[2:]), 1)


def _multiply(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """[n, models, channels, places] by [models, filters, channels], and [models, filters] added, laid out as x is."""
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or x.dtype not in (torch.float32, torch.float64):
        found = weight @ x
        return found if shift is None else found + shift.unsqueeze(-1)
    return _Products.apply(x, weight, shift)


class _Products(torch.autograd.Function):
    """Products into their place, a sample or a model at a time: no weights are repeated, and nothing is moved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
        """Keep what the products of the way back need."""
        ctx.save_for_backward(x, weight)
        return _into_place(x, weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Products again; differentiable once more."""
        gradient, (x, weight) = _in_rows(gradients[0]), ctx.saved_tensors
        of_x, of_weight, of_shift = ctx.needs_input_grad
        back = weight.transpose(1, 2)
        if torch.is_grad_enabled():
            found = back @ gradient, (gradient @ x.transpose(2, 3)).sum(0)
        else:
            found = _into_place(gradient, back, None) if of_x else None, _over_samples(gradient, x)
        return found[0], found[1] if of_weight else None, gradient.sum((0, 3)) if of_shift else None


def _into_place(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """[n, models, rows, places]: where x has its samples first in memory, sample by sample, else model by model."""
    samples, models, _, places = x.shape
    if _samples_lie_first(x):
        found = x.new_empty(samples, models, weight.shape[1], places)
        for one, into in zip(x, found, strict=True):
            _product(one, weight, None if shift is None else shift.unsqueeze(2), into)
        return found
    found = x.new_empty(models, samples, weight.shape[1], places)
    for model, into in enumerate(found):
        own = None if shift is None else shift[model].view(1, -1, 1)
        _product(x[:, model], weight[model].expand(samples, -1, -1), own, into)
    return found.transpose(0, 1)


def _in_rows(x: Tensor) -> Tensor:
    """With the places beside each other in memory."""
    return x if x.stride(3) == 1 and x.stride(2) >= x.shape[3] else x.contiguous()


def _samples_lie_first(x: Tensor) -> bool:
    return x.stride(0) >= x.stride(1)


def _product(x: Tensor, weight: Tensor, shift: Tensor | None, into: Tensor) -> None:
    if shift is None:
        torch.bmm(weight, x, out=into)
    else:
        torch.baddbmm(shift, weight, x, out=into)


def _over_samples(gradient: Tensor, x: Tensor) -> Tensor:
    """[models, filters, channels]: the products of every sample, added up."""
    total = x.new_zeros(x.shape[1], gradient.shape[2], x.shape[2])
    for one, own in zip(gradient, x, strict=True):
        total.baddbmm_(one, own.transpose(1, 2))
    return total
