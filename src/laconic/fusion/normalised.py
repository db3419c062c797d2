"""Normalisation by kernels of our own: the input and a few numbers of each row, group or channel are kept.

Derivatives of derivatives are by torch's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.fusion.batch import Batch, Value, along
from laconic.kernels import normalised as kernels
from laconic.kernels.base import compiled

Gradients = tuple[Tensor | None, ...]


def has_kernel(input: Value, *affine: Value | None) -> bool:
    """Whether a kernel takes such an input, with a gain and a shift, outside of autocast."""
    tensor = input.tensor if isinstance(input, Batch) else input
    plain = tensor.dtype == torch.float32 and not torch.is_autocast_enabled(tensor.device.type) and tensor.numel() > 0
    return plain and None not in affine and compiled(tensor) is not None


def by_layers(size: int, shape: tuple[int, ...], eps: float, input: Batch, weight: Value, bias: Value) -> Batch:
    """Layer normalisation of inputs that are each model's own."""
    every = input.at(0).contiguous()
    gain, shift = (along(value, 0, size).reshape(size, -1).contiguous() for value in (weight, bias))
    found = _ByLayers.apply(every.view(size, -1, prod(shape)), gain, shift, eps)
    return Batch(found.view_as(every), 0)


def by_groups(size: int, groups: int, eps: float, input: Value, weight: Value, bias: Value) -> Batch:
    """Group normalisation of [n, channels, places...], of one model."""
    gain, shift = (along(value, 0, size).contiguous() for value in (weight, bias))
    return _as_given(_ByGroups.apply(_in_blocks(input, size), gain, shift, groups, eps), input)


def by_channels(size: int, eps: float, input: Value, weight: Value, bias: Value) -> tuple[Batch, Tensor, Tensor]:
    """Batch normalisation in training of [n, channels, places...], of one model; means and variances besides."""
    gain, shift = (along(value, 0, size).contiguous() for value in (weight, bias))
    found, mean, variance = _ByChannels.apply(_in_blocks(input, size), gain, shift, eps)
    return _as_given(found, input), mean, variance


def _in_blocks(input: Value, size: int) -> Tensor:
    """[models, n, channels, places], the last two dense; what is shared is not repeated."""
    every = along(input, 0, size)
    every = every.flatten(3) if every.dim() > 3 else every.unsqueeze(3)
    one = every[0, 0]
    return every if one.is_contiguous() else every.contiguous()


def _as_given(found: Tensor, input: Value) -> Batch:
    """The models' axis is told where it lies in memory."""
    places = input.shape[2:]
    axis = int(found.stride(0) < found.stride(1))
    found = found.transpose(0, axis)
    return Batch(found.unflatten(3, places) if places else found.squeeze(3), axis)


class _ByLayers(torch.autograd.Function):
    """Of [models, count, n]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        """One pass over memory."""
        found, mean, scale = kernels.layer_norm(x, gain, shift, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, scale)
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One pass again."""
        (gradient,), (x, gain, shift, mean, scale) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(ctx, _layers_by_torch, gradient, (x, gain, shift), ctx.eps)
        return *kernels.layer_norm_back(gradient.contiguous(), x, gain, mean, scale), None


class _ByGroups(torch.autograd.Function):
    """Of [models, n, channels, places]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, groups: int, eps: float) -> Tensor:
        """One pass over memory."""
        found, mean, variance = kernels.group_norm(x, gain, shift, groups=groups, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, variance)
        ctx.groups, ctx.eps = groups, eps
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One pass again."""
        (gradient,), (x, gain, shift, mean, variance) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(ctx, _groups_by_torch, gradient, (x, gain, shift), ctx.groups, ctx.eps)
        trained, settings = ctx.needs_input_grad[0], {"groups": ctx.groups, "eps": ctx.eps}
        return *kernels.group_norm_back(gradient, x, gain, mean, variance, trained=trained, **settings), None, None


class _ByChannels(torch.autograd.Function):
    """Of [models, n, channels, places]; means and variances come without gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over memory."""
        found, mean, variance = kernels.batch_norm(x, gain, shift, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        ctx.eps = eps
        return found, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One pass again."""
        gradient, (x, gain, shift, mean, variance) = gradients[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(ctx, _channels_by_torch, gradient, (x, gain, shift), ctx.eps)
        trained = ctx.needs_input_grad[0]
        return *kernels.batch_norm_back(gradient, x, gain, mean, variance, eps=ctx.eps, trained=trained), None


def _layers_by_torch(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[2:], eps=eps) * gain.unsqueeze(1) + shift.unsqueeze(1)


def _groups_by_torch(x: Tensor, gain: Tensor, shift: Tensor, groups: int, eps: float) -> Tensor:
    merged = x.transpose(0, 1).flatten(1, 2)
    found = F.group_norm(merged, len(x) * groups, gain.flatten(), shift.flatten(), eps)
    return found.unflatten(1, gain.shape).transpose(0, 1)


def _channels_by_torch(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    merged = x.transpose(0, 1).flatten(1, 2)
    found = F.batch_norm(merged, None, None, gain.flatten(), shift.flatten(), training=True, eps=eps)
    return found.unflatten(1, gain.shape).transpose(0, 1)


def _again(
    ctx: Any, plain: Callable[..., Tensor], gradient: Tensor, inputs: Sequence[Tensor], *settings: Any
) -> Gradients:
    """First derivatives that can be differentiated, and None for each of the settings."""
    asked = ctx.needs_input_grad[: len(inputs)]
    wanted = [x for x, needed in zip(inputs, asked, strict=True) if needed]
    found = iter(torch.autograd.grad(plain(*inputs, *settings), wanted, gradient, create_graph=True))
    return *(next(found) if needed else None for needed in asked), *[None] * len(settings)
