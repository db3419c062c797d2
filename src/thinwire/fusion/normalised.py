"""Normalisation by kernels of our own: the input and a few numbers of each row, group or channel are kept.

Derivatives of derivatives are by torch's arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.fusion.batch import Batch, Value, along, dense
from thinwire.fusion.derivatives import Gradients, again
from thinwire.kernels import normalised as kernels


def by_layers(size: int, eps: float, input: Value, weight: Value, bias: Value) -> Batch:
    """Layer normalisation over the last axes, as many as the gain has."""
    x = input.at(0).contiguous() if isinstance(input, Batch) else along(input, 0, size)
    return Batch(_ByLayers.apply(x, *_dense(size, weight, bias), eps), 0)


def by_groups(size: int, groups: int, eps: float, input: Value, weight: Value, bias: Value) -> Batch:
    """Group normalisation of [n, channels, places...], of one model."""
    x, axis = _blocks(input, size)
    return Batch(_ByGroups.apply(x, *_dense(size, weight, bias), axis, groups, eps), axis)


def by_channels(size: int, eps: float, input: Value, weight: Value, bias: Value) -> tuple[Batch, Tensor, Tensor]:
    """Batch normalisation in training of [n, channels, places...], of one model; means and variances besides."""
    x, axis = _blocks(input, size)
    found, mean, variance = _ByChannels.apply(x, *_dense(size, weight, bias), axis, eps)
    return Batch(found, axis), mean, variance


def _dense(size: int, *affine: Value) -> list[Tensor]:
    return [along(value, 0, size).contiguous() for value in affine]


def _blocks(input: Value, size: int) -> tuple[Tensor, int]:
    """As the kernels take it, and the models' axis; what is shared is not repeated."""
    return dense(input) if isinstance(input, Batch) else (along(input, 0, size), 0)


class _ByLayers(torch.autograd.Function):
    """Of [models, ..., n]."""

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
            return again(ctx, _layers_by_torch, gradient, (x, gain, shift), ctx.eps)
        return *kernels.layer_norm_back(gradient, x, gain, mean, scale, trained=ctx.needs_input_grad[0]), None


class _ByGroups(torch.autograd.Function):
    """Of [models, n, channels, places...], or with samples first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, axis: int, groups: int, eps: float) -> Tensor:
        """One pass over memory."""
        found, mean, variance = kernels.group_norm(x, gain, shift, axis=axis, groups=groups, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, variance)
        ctx.settings = axis, groups, eps
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One pass again."""
        (gradient,), (x, gain, shift, mean, variance) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(ctx, _groups_by_torch, gradient, (x, gain, shift), *ctx.settings)
        (axis, groups, eps), trained = ctx.settings, ctx.needs_input_grad[0]
        found = kernels.group_norm_back(
            gradient, x, gain, mean, variance, axis=axis, groups=groups, eps=eps, trained=trained
        )
        return *found, None, None, None


class _ByChannels(torch.autograd.Function):
    """Of [models, n, channels, places...], or with samples first; means and variances come without gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, axis: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over memory."""
        found, mean, variance = kernels.batch_norm(x, gain, shift, axis=axis, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        ctx.settings = axis, eps
        return found, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One pass again."""
        gradient, (x, gain, shift, mean, variance) = gradients[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            return again(ctx, _channels_by_torch, gradient, (x, gain, shift), *ctx.settings)
        (axis, eps), trained = ctx.settings, ctx.needs_input_grad[0]
        found = kernels.batch_norm_back(gradient, x, gain, mean, variance, axis=axis, eps=eps, trained=trained)
        return *found, None, None


def _layers_by_torch(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    own, moved = (value.view(len(x), *[1] * (x.dim() - value.dim()), *value.shape[1:]) for value in (gain, shift))
    return F.layer_norm(x, gain.shape[1:], eps=eps) * own + moved


def _groups_by_torch(x: Tensor, gain: Tensor, shift: Tensor, axis: int, groups: int, eps: float) -> Tensor:
    merged = _samples_first(x, axis).flatten(1, 2)
    found = F.group_norm(merged, len(gain) * groups, gain.flatten(), shift.flatten(), eps)
    return _samples_first(found.unflatten(1, gain.shape), axis)


def _channels_by_torch(x: Tensor, gain: Tensor, shift: Tensor, axis: int, eps: float) -> Tensor:
    merged = _samples_first(x, axis).flatten(1, 2)
    found = F.batch_norm(merged, None, None, gain.flatten(), shift.flatten(), training=True, eps=eps)
    return _samples_first(found.unflatten(1, gain.shape), axis)


def _samples_first(x: Tensor, axis: int) -> Tensor:
    """With the models second, where they are not; and the reverse."""
    return x if axis else x.transpose(0, 1)
