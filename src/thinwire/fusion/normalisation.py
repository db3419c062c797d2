"""Normalisation of all models at once, with each model's own statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.fusion.autotune import Way, fastest, has_kernel
from thinwire.fusion.batch import Batch, Value, along, each, flat
from thinwire.fusion.normalised import by_channels, by_groups, by_layers
from thinwire.fusion.routing import Context, rule


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
    first, last = dict[str, Way](), dict[str, Way]()
    own = not isinstance(running_mean, Tensor) and not isinstance(running_var, Tensor)
    if training and own and isinstance(input, Tensor) and not _casts(input):
        first["once"] = partial(_once, context.size, momentum, eps)
    if training and own and _count(input) > 1 and has_kernel(input, weight, bias):
        last["by kernel"] = partial(_by_kernel, context.size, momentum, eps)
    return _side_by_side(context, function, values, settings, first, last)


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


def _count(input: Value) -> int:
    """How many numbers of a channel one model sees."""
    return prod((input.shape[0], *input.shape[2:]))


def _by_kernel(
    size: int,
    momentum: float,
    eps: float,
    input: Value,
    running_mean: Batch | None,
    running_var: Batch | None,
    weight: Value,
    bias: Value,
) -> Batch:
    found, mean, variance = by_channels(size, eps, input, weight, bias)
    count = _count(input)
    with torch.no_grad():
        for kept, own, factor in ((running_mean, mean, 1.0), (running_var, variance, count / (count - 1))):
            if kept is not None:
                kept.at(0).mul_(1 - momentum).add_(own, alpha=momentum * factor)
    return found


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
    return _side_by_side(context, function, values, (use_input_stats, momentum, eps), {}, {})


def _side_by_side(
    context: Context,
    function: Any,
    values: Sequence[Value | None],
    settings: Any,
    first: dict[str, Way],
    last: dict[str, Way],
) -> Batch:
    size = context.size

    def channels(input: Value, *others: Value | None) -> Batch:
        x = along(input, 1, size).flatten(1, 2)
        found = function(x, *(flat(value, size) for value in others), *settings)
        return Batch(found.unflatten(1, (size, -1)), 1)

    def loop(*own: Value | None) -> Batch:
        return each(function, size, *own, *settings)

    return fastest(function.__name__, {**first, "channels": channels, "loop": loop, **last}, values, settings)


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

    ways: dict[str, Way] = {"channels": channels, "loop": loop}
    if has_kernel(input, weight, bias):
        ways["by kernel"] = partial(by_groups, size, num_groups, eps)
    return fastest("group_norm", ways, (input, weight, bias), (num_groups, eps))


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
    if has_kernel(input, weight, bias):
        ways["by kernel"] = partial(by_layers, context.size, eps)
    return fastest("layer_norm", ways, (input, weight, bias), (eps,))


def _casts(tensor: Tensor) -> bool:
    """Whether autocast would compute in another dtype than the input's, or the input's is a short one."""
    return tensor.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(tensor.device.type)


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
