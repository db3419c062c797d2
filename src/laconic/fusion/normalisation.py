"""Normalisation of all models at once, with each model's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laconic.fusion.batch import Batch, Value, along, each, flat
from laconic.fusion.choice import Way, fastest
from laconic.fusion.routing import Context, rule


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
    return _by_channels(context, function, values, settings)


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
    return _by_channels(context, function, values, (use_input_stats, momentum, eps))


def _by_channels(context: Context, function: Any, values: Sequence[Value | None], settings: Any) -> Batch:
    size = context.size

    def channels(input: Value, *others: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, *(flat(value, size) for value in others), *settings)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def loop(*own: Value | None) -> Batch:
        return each(function, size, *own, *settings)

    return fastest(function.__name__, {"channels": channels, "loop": loop}, values, settings)


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
    if isinstance(input, Batch) and weight is not None and bias is not None and not _casts(input.tensor):
        ways["by hand"] = partial(_by_hand, context.size, shape, eps)
    return fastest("layer_norm", ways, (input, weight, bias), (eps,))


def _casts(tensor: Tensor) -> bool:
    """Whether autocast would compute in another dtype than the input's, or the input's is a short one."""
    return tensor.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(tensor.device.type)


def _by_hand(size: int, shape: tuple[int, ...], eps: float, input: Batch, weight: Value, bias: Value) -> Batch:
    gain, shift = along(weight, 0, size).contiguous(), along(bias, 0, size).contiguous()
    return Batch(_LayerNorm.apply(input.at(0).contiguous(), gain, shift, shape, eps), 0)


class _LayerNorm(torch.autograd.Function):
    """Layer normalisation of [models, ..., *shape], model after model: each part is used while it is in the cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        """Nothing is kept but the input and two numbers per row."""
        found, statistics = torch.empty_like(x), list[tuple[Tensor, Tensor]]()
        for own, row, weight, bias in zip(found, x, gain, shift, strict=True):
            normal, mean, scale = torch.native_layer_norm(row, shape, weight, bias, eps)
            own.copy_(normal)
            statistics.append((mean, scale))
        ctx.save_for_backward(x, gain, shift)
        ctx.statistics, ctx.shape = statistics, shape
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """By torch's kernel, which has a derivative itself."""
        x, gain, shift = ctx.saved_tensors
        found = [torch.empty_like(each) for each in (x, gain, shift)]
        kernel, wanted = torch.ops.aten.native_layer_norm_backward.default, [True, True, True]
        for model, (mean, scale) in enumerate(ctx.statistics):
            own = gradients[0][model].contiguous(), x[model], ctx.shape, mean, scale, gain[model], shift[model], wanted
            for whole, part in zip(found, kernel(*own), strict=True):
                whole[model].copy_(part)
        return (*found, None, None)


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
