# SPDX-License-Identifier: Apache-2.0
"""Normalisation of all models at once, each model with its own statistics, gain (weight) and shift (bias).

Shapes: B models, n samples, c channels, s... spatial axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays.fusion.autotune import Implementation, has_kernel, run_fastest
from thinwire.arrays.fusion.batch import Batch, Value, along, contiguous, fold, loop, tensor_of
from thinwire.arrays.fusion.routing import COMPOSITES, Context, Gradients, differentiable_gradients, rule
from thinwire.core import torch_internals
from thinwire.core.kernels import normalised as kernels


@rule(F.batch_norm)
def batch_norm(
    context: Context,
    function: Any,
    input: Value,
    running_mean: Value | None,
    running_var: Value | None,
    weight: Value | None = None,
    bias: Value | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Batch:
    """Normalise the models' channels side by side; running statistics are updated in each model's row."""
    weight = gain_for(input, weight, bias)
    first, last = dict[str, Implementation](), dict[str, Implementation]()
    own = not isinstance(running_mean, Tensor) and not isinstance(running_var, Tensor)
    if training and own and isinstance(input, Tensor) and not _autocast(input):
        first["normalise once"] = partial(_batch_norm_once, context.size, momentum, eps)
    if training and own and prod((input.shape[0], *input.shape[2:])) > 1 and has_kernel(input, weight, bias):
        last["kernel"] = partial(_batch_norm_by_kernel, context.size, momentum, eps)
    values, settings = (input, running_mean, running_var, weight, bias), (training, momentum, eps)
    return _by_channels(context.size, function, values, settings, first, last)


@rule(F.instance_norm)
def instance_norm(
    context: Context,
    function: Any,
    input: Value,
    running_mean: Value | None = None,
    running_var: Value | None = None,
    weight: Value | None = None,
    bias: Value | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Batch:
    """Normalise the models' channels side by side, each sample by itself."""
    weight = gain_for(input, weight, bias)
    values = (input, running_mean, running_var, weight, bias)
    return _by_channels(context.size, function, values, (use_input_stats, momentum, eps), {}, {})


def gain_for(input: Value, weight: Value | None, bias: Value | None) -> Value | None:
    """Return the gain that torch's batch normalisation is given: ones where there is none beside a shift, off the CPU.

    Its backward pass on a GPU returns an empty gradient of such a shift, which autograd refuses.
    """
    device = tensor_of(input).device
    if weight is not None or bias is None or device.type == "cpu":
        return weight
    return torch.ones(bias.shape, dtype=tensor_of(bias).dtype, device=device)


def _by_channels(
    size: int,
    function: Any,
    values: Sequence[Value | None],
    settings: Any,
    first: dict[str, Implementation],
    last: dict[str, Implementation],
) -> Batch:
    def channels(input: Value, *others: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, *(fold(value, size) for value in others), *settings)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def looped(*own: Value | None) -> Batch:
        return loop(function, size, *own, *settings)

    return run_fastest(function.__name__, {**first, "channels": channels, "loop": looped, **last}, values, settings)


def _batch_norm_once(size: int, momentum: float, eps: float, input: Tensor, *others: Value | None) -> Batch:
    """Normalise a shared input once, as all models have the same statistics, then apply each model's own affine."""
    running, (weight, bias) = others[:2], others[2:]
    # With momentum 1 these become the batch's own mean and variance.
    found = [None if kept is None else input.new_zeros(input.shape[1]) for kept in running]
    normal = F.batch_norm(input, *found, training=True, momentum=1.0, eps=eps)
    with torch.no_grad():
        for kept, own in zip(running, found, strict=True):
            if kept is not None and own is not None:
                along(kept, 0, size).mul_(1 - momentum).add_(own, alpha=momentum)
    shape = (1, size, -1, *[1] * (input.dim() - 2))
    expanded = normal.unsqueeze(1).expand(-1, size, *normal.shape[1:])
    gain, shift = (None if value is None else along(value, 0, size).reshape(shape) for value in (weight, bias))
    if gain is None:
        return Batch(expanded.contiguous() if shift is None else expanded + shift, 1)
    return Batch(expanded * gain if shift is None else torch.addcmul(shift, expanded, gain), 1)


def _batch_norm_by_kernel(
    size: int,
    momentum: float,
    eps: float,
    input: Value,
    running_mean: Batch | None,
    running_var: Batch | None,
    weight: Value,
    bias: Value,
) -> Batch:
    x, axis = _blocks(input, size)
    found, mean, variance = _BatchNorm.apply(x, *_affine(size, weight, bias), axis, eps)
    count = prod((input.shape[0], *input.shape[2:]))
    with torch.no_grad():
        # torch keeps the unbiased variance.
        for kept, own, factor in ((running_mean, mean, 1.0), (running_var, variance, count / (count - 1))):
            if kept is not None:
                kept.at(0).mul_(1 - momentum).add_(own, alpha=momentum * factor)
    return Batch(found, axis)


def cumulative_batch_norm(module: nn.Module, input: Tensor) -> Tensor:
    """Return the forward of batch normalisation with `momentum=None`: a cumulative average over a model's own batches.

    torch reads the number of batches as a Python number, which would be the same for all models.
    """
    layer: Any = module
    torch_internals.check_batch_norm_input(module, input)
    affine = (layer.weight, layer.bias)
    if not layer.training:
        return F.batch_norm(input, layer.running_mean, layer.running_var, *affine, False, 0.0, layer.eps)
    layer.num_batches_tracked.add_(1)
    share = 1.0 / layer.num_batches_tracked.to(input.dtype)
    axes = [axis for axis in range(input.dim()) if axis != 1]
    with torch.no_grad():
        variance, mean = torch.var_mean(input, dim=axes)
        layer.running_mean.copy_(share * mean + (1 - share) * layer.running_mean)
        layer.running_var.copy_(share * variance + (1 - share) * layer.running_var)
    return F.batch_norm(input, None, None, *affine, True, 0.0, layer.eps)


@rule(F.group_norm)
def group_norm(
    context: Context,
    function: Any,
    input: Value,
    num_groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Batch:
    """Normalise the groups of all models side by side."""
    size = context.size

    def channels(input: Value, weight: Value | None, bias: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, size * num_groups, fold(weight, size), fold(bias, size), eps)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def looped(input: Value, weight: Value | None, bias: Value | None) -> Batch:
        return loop(function, size, input, num_groups, weight, bias, eps)

    # No kernel: a group is contiguous memory, and torch normalises those of all models as fast.
    candidates: dict[str, Implementation] = {"channels": channels, "loop": looped}
    return run_fastest("group_norm", candidates, (input, weight, bias), (num_groups, eps))


@rule(F.layer_norm)
def layer_norm(
    context: Context,
    function: Any,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
) -> Batch:
    """Normalise all rows at once, then apply each model's own affine."""
    size, shape = context.size, tuple(normalized_shape)
    candidates: dict[str, Implementation] = {
        "normalise then scale": partial(_normalise_then_scale, partial(function, eps=eps), size, shape),
        "loop": lambda x, gain, shift: loop(function, size, x, shape, gain, shift, eps),
    }
    if has_kernel(input, weight, bias):
        candidates["kernel"] = partial(_layer_norm_by_kernel, size, eps)
    return run_fastest("layer_norm", candidates, (input, weight, bias), (eps,))


@rule(F.rms_norm)
def rms_norm(
    context: Context,
    function: Any,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> Batch:
    """Normalise all rows at once, without mean and shift, then apply each model's own gain."""
    size, shape, normalise = context.size, tuple(normalized_shape), partial(function, eps=eps)
    candidates: dict[str, Implementation] = {
        "normalise then scale": lambda x, gain: _normalise_then_scale(normalise, size, shape, x, gain, None),
        "loop": lambda x, gain: loop(function, size, x, normalized_shape, gain, eps),
    }
    return run_fastest("rms_norm", candidates, (input, weight), (eps,))


def _normalise_then_scale(
    normalise: Any, size: int, shape: tuple[int, ...], input: Value, weight: Value | None, bias: Value | None
) -> Batch:
    """Normalize a shared input once; otherwise the models' axis stays where it is among the rows."""
    lead = len(input.shape) - len(shape)
    axis = input.axis if isinstance(input, Batch) and input.axis <= lead else 0
    found = normalise(input.at(axis) if isinstance(input, Batch) else input.unsqueeze(0), list(shape))

    def beside(value: Value) -> Tensor:
        return along(value, 0, size).view(size, *[1] * (lead - axis), *shape)

    if weight is None:
        return Batch(found if bias is None else found + beside(bias), axis)
    if bias is None:
        return Batch(found * beside(weight), axis)
    return Batch(torch.addcmul(beside(bias), found, beside(weight)), axis)


def _autocast(tensor: Tensor) -> bool:
    """Return True if autocast would compute in another dtype than the input's, or the input's is a 16-bit one."""
    return tensor.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(tensor.device.type)


# -- by compiled kernels: they keep the input and two numbers per row or channel --------------------------------


def _layer_norm_by_kernel(size: int, eps: float, input: Value, weight: Value, bias: Value) -> Batch:
    x = input.at(0).contiguous() if isinstance(input, Batch) else along(input, 0, size)
    return Batch(_LayerNorm.apply(x, *_affine(size, weight, bias), eps), 0)


def _affine(size: int, *values: Value) -> list[Tensor]:
    return [along(value, 0, size).contiguous() for value in values]


def _blocks(input: Value, size: int) -> tuple[Tensor, int]:
    """Return the input as the kernels take it, and the models' axis; a shared input is expanded without a copy."""
    return contiguous(input) if isinstance(input, Batch) else (along(input, 0, size), 0)


class _LayerNorm(torch.autograd.Function):
    """Layer normalisation of [B, ..., normalised axes]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        """Normalise in one pass over memory."""
        found, mean, scale = kernels.layer_norm(x, gain, shift, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, scale)
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Differentiate in one pass; by torch where a graph is asked for."""
        (gradient,), (x, gain, shift, mean, scale) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(ctx, _layer_norm_by_torch, gradient, (x, gain, shift), ctx.eps)
        return *kernels.layer_norm_back(gradient, x, gain, mean, scale, trained=ctx.needs_input_grad[0]), None


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation of [B, n, c, s...] (axis 0) or [n, B, c, s...] (axis 1); no gradient reaches the moments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, axis: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise in one pass over memory."""
        found, mean, variance = kernels.batch_norm(x, gain, shift, axis=axis, eps=eps)
        ctx.save_for_backward(x, gain, shift, mean, variance)
        ctx.mark_non_differentiable(mean, variance)
        ctx.settings = axis, eps
        return found, mean, variance

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Differentiate in one pass; by torch where a graph is asked for."""
        gradient, (x, gain, shift, mean, variance) = gradients[0], ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiable_gradients(ctx, _batch_norm_by_torch, gradient, (x, gain, shift), *ctx.settings)
        (axis, eps), trained = ctx.settings, ctx.needs_input_grad[0]
        found = kernels.batch_norm_back(gradient, x, gain, mean, variance, axis=axis, eps=eps, trained=trained)
        return *found, None, None


def _layer_norm_by_torch(x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
    own, moved = (value.view(len(x), *[1] * (x.dim() - value.dim()), *value.shape[1:]) for value in (gain, shift))
    return F.layer_norm(x, gain.shape[1:], eps=eps) * own + moved


def _batch_norm_by_torch(x: Tensor, gain: Tensor, shift: Tensor, axis: int, eps: float) -> Tensor:
    merged = _samples_first(x, axis).flatten(1, 2)
    found = F.batch_norm(merged, None, None, gain.flatten(), shift.flatten(), training=True, eps=eps)
    return _samples_first(found.unflatten(1, gain.shape), axis)


def _samples_first(x: Tensor, axis: int) -> Tensor:
    """Return [n, B, ...] of what has its models along `axis`; its own inverse."""
    return x if axis else x.transpose(0, 1)


def normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    """As `F.normalize`; vmap has no calls with `out`, which spectral normalisation uses."""
    found = input / input.norm(p, dim, keepdim=True).clamp_min(eps).expand_as(input)
    return found if out is None else out.copy_(found)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """As `torch._weight_norm`, for which vmap has no rule: directions `v` with the norms `g` along `dim`; -1 is all."""
    axes = tuple(axis for axis in range(v.dim()) if axis != dim)
    norm = torch.linalg.vector_norm(v, dim=axes, keepdim=dim >= 0) if axes else v.abs()
    return v * (g / norm)


COMPOSITES[F.normalize] = normalize
if torch_internals.weight_norm is not None:
    COMPOSITES[torch_internals.weight_norm] = weight_norm
