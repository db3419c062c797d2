"""Convolutions and pooling of all models at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from thinwire.fusion.autotune import Way, fastest
from thinwire.fusion.batch import Batch, Value, along, each, flat
from thinwire.fusion.in_turn import in_turn
from thinwire.fusion.pointwise import Steps, is_pointwise, of_each, pointwise
from thinwire.fusion.routing import Context, rule

# Of all models' inputs: about where they no longer fit the caches.
_LARGE_BYTES = 8 << 20
_POOLS = (
    *(F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    *(F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices),
    *(F.adaptive_max_pool1d_with_indices, F.adaptive_max_pool2d_with_indices, F.adaptive_max_pool3d_with_indices),
)


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolve(
    context: Context,
    function: Any,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Steps = 1,
    padding: Steps | str = 0,
    dilation: Steps = 1,
    groups: int = 1,
) -> Batch:
    """Each model's filters on its own channels; on an input that is shared they are simply more filters."""
    settings = (stride, padding, dilation, groups)
    size, shared = context.size, not isinstance(input, Batch)
    loop = partial(_looped, function, size, settings, (stride, padding, dilation, False, 0, groups))
    ways: dict[str, Way] = {"grouped": partial(_grouped, function, size, settings), "loop": loop}
    if not isinstance(weight, Batch):
        ways = {"folded": partial(_folded, function, size, settings)}
    elif shared and groups == 1:
        ways = {"side by side": partial(_side_by_side, function, size, settings), **ways}
    if isinstance(weight, Batch) and function is F.conv2d and groups == 1 and not isinstance(padding, str):
        ways["unfolded"] = partial(_unfolded, size, stride, padding, dilation)
    if isinstance(weight, Batch) and is_pointwise(weight, stride, padding, groups):
        ways["products"] = partial(pointwise, size)
    return _with_samples(function, ways, input, weight, bias, settings)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def convolve_back(
    context: Context,
    function: Any,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Steps = 1,
    padding: Steps = 0,
    output_padding: Steps = 0,
    groups: int = 1,
    dilation: Steps = 1,
) -> Batch:
    """The transposed convolution, as `convolve`."""
    size, settings = context.size, (stride, padding, output_padding, groups, dilation)
    loop = partial(_looped, function, size, settings, (stride, padding, dilation, True, output_padding, groups))
    ways: dict[str, Way] = {"grouped": partial(_grouped, function, size, settings), "loop": loop}
    if not isinstance(weight, Batch):
        ways = {"folded": partial(_folded, function, size, settings)}
    elif not isinstance(input, Batch) and groups == 1:
        ways = {"side by side": partial(_side_by_side_back, function, size, settings), **ways}
    return _with_samples(function, ways, input, weight, bias, settings)


def _with_samples(
    function: Any, ways: dict[str, Way], input: Value, weight: Value, bias: Value | None, settings: Any
) -> Batch:
    """Give a single sample its axis, and take it away again."""
    if len(input.shape) == len(weight.shape):
        return fastest(function.__name__, ways, (input, weight, bias), settings)
    one = Batch(input.at(0).unsqueeze(1), 0) if isinstance(input, Batch) else input.unsqueeze(0)
    found = fastest(function.__name__, ways, (one, weight, bias), settings)
    return Batch(found.at(0).squeeze(1), 0)


def _grouped(function: Any, size: int, settings: Any, input: Value, weight: Batch, bias: Value | None) -> Batch:
    channels = along(input, 1, size).flatten(1, 2)
    many = list(settings)
    many[3] *= size  # the number of groups stands there, transposed or not
    found = function(channels, flat(weight, size), flat(bias, size), *many)
    return Batch(found.unflatten(1, (size, -1)), 1)


def _side_by_side(function: Any, size: int, settings: Any, input: Tensor, weight: Batch, bias: Value | None) -> Batch:
    found = function(input, flat(weight, size), flat(bias, size), *settings)
    return Batch(found.unflatten(1, (size, -1)), 1)


def _side_by_side_back(
    function: Any, size: int, settings: Any, input: Tensor, weight: Batch, bias: Value | None
) -> Batch:
    """A transposed convolution's filters have what they make along their second axis."""
    found = function(input, weight.at(1).flatten(1, 2), flat(bias, size), *settings)
    return Batch(found.unflatten(1, (size, -1)), 1)


def _looped(
    function: Any, size: int, settings: Any, whole: Any, input: Value, weight: Batch, bias: Value | None
) -> Batch:
    """One model after another; of what exceeds the caches each result is put into its place while it is in them."""
    large = isinstance(input, Batch) and input.tensor.nbytes >= _LARGE_BYTES
    plain = not isinstance(whole[1], str) and not torch.is_autocast_enabled(weight.tensor.device.type)
    if large and plain:
        return in_turn(size, whole, input, weight, bias)
    return each(function, size, input, weight, bias, *settings)


def _folded(function: Any, size: int, settings: Any, input: Value, weight: Tensor, bias: Value | None) -> Batch:
    """Filters that are shared see the models as more samples."""
    own = isinstance(bias, Batch)
    found = function(along(input, 0, size).flatten(0, 1), weight, None if own else bias, *settings)
    found = found.unflatten(0, (size, -1))
    if isinstance(bias, Batch):
        found = found + bias.at(0).view(size, 1, -1, *[1] * (found.dim() - 3))
    return Batch(found, 0)


def _unfolded(
    size: int, stride: Steps, padding: Steps, dilation: Steps, input: Value, weight: Batch, bias: Value | None
) -> Batch:
    """Patches as columns, and a batched product with the filters."""
    filters = weight.at(0)
    high, wide = filters.shape[-2:]
    samples = input if isinstance(input, Tensor) else input.at(0).flatten(0, 1)
    patches = F.unfold(samples, (high, wide), dilation, padding, stride)
    rows = filters.flatten(2)
    if isinstance(input, Tensor):
        found = torch.matmul(rows.flatten(0, 1), patches).unflatten(1, (size, -1)).movedim(1, 0)
    else:
        found = torch.matmul(rows.unsqueeze(1), patches.unflatten(0, (size, -1)))
    if bias is not None:
        found = found + along(bias, 0, size).view(size, 1, -1, 1)
    steps = zip(
        samples.shape[-2:], (high, wide), *(of_each(some, 2) for some in (stride, padding, dilation)), strict=True
    )
    return Batch(found.unflatten(-1, [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in steps]), 0)


@rule(*_POOLS)
def pool(context: Context, function: Any, input: Value, *args: Any, **kwargs: Any) -> Any:
    """Channels do not mix: the models stand where they cost no copy, among the channels or among the samples."""
    if not isinstance(input, Batch):
        return function(input, *args, **kwargs)
    axis = min(input.axis, 1) if len(input.shape) == _dimensions(function) + 2 else 0
    x = input.at(axis)
    whole = len(input.shape) == _dimensions(function) + 2
    found = function(x.flatten(axis, axis + 1) if whole else x, *args, **kwargs)
    if not whole:
        return pytree.tree_map(lambda leaf: Batch(leaf, 0), found)
    return pytree.tree_map(lambda leaf: Batch(leaf.unflatten(axis, (context.size, -1)), axis), found)


def _dimensions(function: Any) -> int:
    """How many axes a pooling function looks along."""
    return next(i for i in (1, 2, 3) if f"pool{i}d" in function.__name__)
