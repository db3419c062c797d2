"""Normalisation of all models at once, with each model's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.fusion.batch import Batch, Value, along, each, flat
from laconic.fusion.choice import Way, fastest
from laconic.fusion.routing import Context, rule
from laconic.kernels import normalised as kernels
from laconic.kernels.base import compiled


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
    """The models' channels side by side; running statistics are updated in their own rows."""
    settings = (training, momentum, eps)
    values = (input, running_mean, running_var, weight, bias)
    ways: dict[str, Way] = {}
    own = not isinstance(running_mean, Tensor) and not isinstance(running_var, Tensor)
    if training and own and isinstance(input, Tensor) and not _casts(input):
        ways["once"] = partial(_once, context.size, momentum, eps)
    return _by_channels(context, function, values, settings, ways)


def _once(size: int, momentum: float, eps: float, input: Tensor, *others: Value | None) -> Batch:
    """What is shared has the same statistics for all: it is normalised once, and each model's own are moved by them."""
    running, (weight, bias) = others[:2], others[2:]
    found = [None if kept is None else input.new_zeros(input.shape[1]) for kept in running]
    normal = F.batch_norm(input, *found, training=True, momentum=1.0, eps=eps)
    with torch.no_grad():
        for kept, own in zip(running, found, strict=True):
            if kept is not None and own is not None:
                along(kept, 0, size).mul_(1 - momentum).add_(own, alpha=momentum)
    shape = (1, size, -1, *[1] * (input.dim() - 2))
    every = normal.unsqueeze(1).expand(-1, size, *normal.shape[1:])
    gain, shift = (None if value is None else along(value, 0, size).reshape(shape) for value in (weight, bias))
    if gain is None:
        return Batch(every.contiguous(), 1)
    return Batch(every * gain if shift is None else torch.addcmul(shift, every, gain), 1)


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
    """As `batch_norm`, per sample."""
    values = (input, running_mean, running_var, weight, bias)
    return _by_channels(context, function, values, (use_input_stats, momentum, eps), {})


def _by_channels(
    context: Context, function: Any, values: Sequence[Value | None], settings: Any, ways: dict[str, Way]
) -> Batch:
    size = context.size

    def channels(input: Value, *others: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, *(flat(value, size) for value in others), *settings)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def loop(*own: Value | None) -> Batch:
        return each(function, size, *own, *settings)

    return fastest(function.__name__, {**ways, "channels": channels, "loop": loop}, values, settings)


def cumulative_batch_norm(module: nn.Module, input: Tensor) -> Tensor:
    """The forward of batch normalisation with `momentum=None`, whose average depends on each model's own age."""
    layer: Any = module
    layer._check_input_dim(input)
    affine = (layer.weight, layer.bias)
    if not layer.training:
        return F.batch_norm(input, layer.running_mean, layer.running_var, *affine, False, 0.0, layer.eps)
    layer.num_batches_tracked.add_(1)
    share = 1.0 / layer.num_batches_tracked.to(input.dtype)
    channels = [axis for axis in range(input.dim()) if axis != 1]
    with torch.no_grad():
        variance, mean = torch.var_mean(input, dim=channels)
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
    """As many groups for each model, side by side."""
    size = context.size

    def channels(input: Value, weight: Value | None, bias: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, size * num_groups, flat(weight, size), flat(bias, size), eps)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def loop(input: Value, weight: Value | None, bias: Value | None) -> Batch:
        return each(function, size, input, num_groups, weight, bias, eps)

    return fastest("group_norm", {"channels": channels, "loop": loop}, (input, weight, bias), (num_groups, eps))


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
    """Normalise all rows at once, then scale and shift each model's by its own."""
    shape = tuple(normalized_shape)
    ways: dict[str, Way] = {
        "apart": partial(_apart, partial(function, eps=eps), context.size, shape),
        "loop": lambda x, gain, shift: each(function, context.size, x, shape, gain, shift, eps),
    }
    if isinstance(input, Batch) and weight is not None and bias is not None and _has_kernel(input.tensor):
        ways["in rows"] = partial(_in_rows, context.size, shape, eps)
    return fastest("layer_norm", ways, (input, weight, bias), (eps,))


def _has_kernel(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and not _casts(tensor) and compiled(tensor) is not None


def _casts(tensor: Tensor) -> bool:
    """Whether autocast would compute in another dtype than the input's, or the input's is a short one."""
    return tensor.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(tensor.device.type)


def _in_rows(size: int, shape: tuple[int, ...], eps: float, input: Batch, weight: Value, bias: Value) -> Batch:
    every = input.at(0).contiguous()
    gain, shift = (along(value, 0, size).reshape(size, -1).contiguous() for value in (weight, bias))
    found = _LayerNorm.apply(every.view(size, -1, prod(shape)), gain, shift, eps)
    return Batch(found.view_as(every), 0)


class _LayerNorm(torch.autograd.Function):
    """Layer normalisation of [models, count, n] by a kernel of our own; the input and two numbers a row are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> Tensor:
        """One pass over memory."""
        found, mean, scale = kernels.layer_norm(x, gain, shift, eps=eps)
        ctx.save_for_backward(x, gain, mean, scale)
        ctx.eps = eps
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """One pass again; by torch's arithmetic where derivatives of derivatives are asked for."""
        (gradient,), (x, gain, mean, scale) = gradients, ctx.saved_tensors
        if torch.is_grad_enabled():
            return (*_gradients(gradient, x, gain, ctx.eps), None)
        return (*kernels.layer_norm_back(gradient.contiguous(), x, gain, mean, scale), None)


def _gradients(gradient: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of the input, the gain and the shift, each a function of tensors that may be differentiated again."""
    centred = x - x.mean(2, keepdim=True)
    scale = (centred.square().mean(2, keepdim=True) + eps).rsqrt()
    normal, own = centred * scale, gradient * gain.unsqueeze(1)
    of_x = scale * (own - own.mean(2, keepdim=True) - normal * (own * normal).mean(2, keepdim=True))
    return of_x, (gradient * normal).sum(1), gradient.sum(1)


@rule(F.rms_norm)
def rms_norm(
    context: Context,
    function: Any,
    input: Value,
    normalized_shape: Sequence[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> Batch:
    """As `layer_norm`, without mean and shift."""
    ways = {
        "apart": lambda x, gain: _apart(
            partial(function, eps=eps), context.size, tuple(normalized_shape), x, gain, None
        ),
        "loop": lambda x, gain: each(function, context.size, x, normalized_shape, gain, eps),
    }
    return fastest("rms_norm", ways, (input, weight), (eps,))


def _apart(
    normalise: Any, size: int, shape: tuple[int, ...], input: Value, weight: Value | None, bias: Value | None
) -> Batch:
    """What is shared is normalised once; else the models' axis stays where it is among the rows."""
    lead = len(input.shape) - len(shape)
    axis = input.axis if isinstance(input, Batch) and input.axis <= lead else 0
    found = normalise(input.at(axis) if isinstance(input, Batch) else input.unsqueeze(0), list(shape))

    def lined_up(value: Value) -> Tensor:
        return along(value, 0, size).view(size, *[1] * (lead - axis), *shape)

    if weight is None:
        return Batch(found, axis)
    if bias is None:
        return Batch(found * lined_up(weight), axis)
    return Batch(torch.addcmul(lined_up(bias), found, lined_up(weight)), axis)
