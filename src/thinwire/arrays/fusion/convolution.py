# SPDX-License-Identifier: Apache-2.0
"""Convolutions and pooling of all models at once.

Shapes: B models, n samples, c input channels, f filters, s... spatial axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.autotune import Implementation, run_fastest
from thinwire.arrays.fusion.batch import Batch, Value, along, contiguous, fold, loop
from thinwire.arrays.fusion.routing import Context, Gradients, differentiable_gradients, rule
from thinwire.core.torch_internals import pytree

Sizes = int | tuple[int, ...]  # or a list, as functions of torch take it
Settings = tuple[Any, ...]
# All models' inputs together: from about here they no longer fit the caches.
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
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Batch:
    """Apply each model's filters to its own channels; on a shared input the models' filters are simply more filters."""
    more: dict[str, Implementation] = {}
    # F.unfold knows only images.
    if function is F.conv2d and groups == 1 and not isinstance(padding, str):
        more["unfolded"] = partial(_unfolded, context.size, stride, padding, dilation)
    if _is_pointwise(weight, stride, padding, groups):
        more["products"] = partial(_pointwise, context.size)
    settings, full = (stride, padding, dilation, groups), (stride, padding, dilation, False, 0, groups)
    return _convolve(function, context.size, settings, full, more, input, weight, bias)


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def convolve_transposed(
    context: Context,
    function: Any,
    input: Value,
    weight: Value,
    bias: Value | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Batch:
    """Apply each model's transposed convolution, as `convolve`."""
    settings = (stride, padding, output_padding, groups, dilation)
    full = (stride, padding, dilation, True, output_padding, groups)
    return _convolve(function, context.size, settings, full, {}, input, weight, bias)


def _convolve(
    function: Any,
    size: int,
    settings: Settings,
    full: Settings,
    more: dict[str, Implementation],
    input: Value,
    weight: Value,
    bias: Value | None,
) -> Batch:
    """Run the fastest implementation.

    Args:
        function: of torch.
        size: the number of models.
        settings: the rest of its arguments.
        full: the same as `torch.convolution` takes them: transposed or not is at index 3, the groups are last.
        more: implementations, if each model has its own filters.
        input: without an axis of samples, one is added and removed again.
        weight: the filters.
        bias: of each output channel.
    """
    candidates: dict[str, Implementation] = {
        "grouped": partial(_grouped, function, size, settings),
        "loop": partial(_loop, function, size, settings, full),
        **more,
    }
    if not isinstance(weight, Batch):
        candidates = {"folded": partial(_folded, function, size, settings)}
    elif not isinstance(input, Batch) and full[-1] == 1:
        # The output channels of a transposed convolution are its weight's second axis.
        candidates = {"side by side": partial(_side_by_side, function, size, settings, int(full[3])), **candidates}
    if len(input.shape) == len(weight.shape):
        return run_fastest(function.__name__, candidates, (input, weight, bias), settings)
    one = Batch(input.at(0).unsqueeze(1), 0) if isinstance(input, Batch) else input.unsqueeze(0)
    found = run_fastest(function.__name__, candidates, (one, weight, bias), settings)
    return Batch(found.at(0).squeeze(1), 0)


# -- by one call of torch ----------------------------------------------------------------------------------------------


def _grouped(function: Any, size: int, settings: Settings, input: Value, weight: Batch, bias: Value | None) -> Batch:
    """Return one grouped convolution of [n, B * c, s...]: each model is as many groups as it has itself."""
    channels = along(input, 1, size).flatten(1, 2)
    many = list(settings)
    many[3] *= size  # the number of groups is at index 3 of both signatures
    found = function(channels, fold(weight, size), fold(bias, size), *many)
    return Batch(found.unflatten(1, (size, -1)), 1)


def _side_by_side(
    function: Any, size: int, settings: Settings, axis: int, input: Tensor, weight: Batch, bias: Value | None
) -> Batch:
    """One convolution of the shared input with all models' filters, which are along `axis` of one model's weight."""
    found = function(input, weight.at(axis).flatten(axis, axis + 1), fold(bias, size), *settings)
    return Batch(found.unflatten(1, (size, -1)), 1)


def _folded(function: Any, size: int, settings: Settings, input: Value, weight: Tensor, bias: Value | None) -> Batch:
    """Return one convolution with shared filters, for which the models are more samples."""
    own = isinstance(bias, Batch)
    found = function(along(input, 0, size).flatten(0, 1), weight, None if own else bias, *settings)
    found = found.unflatten(0, (size, -1))
    if isinstance(bias, Batch):
        found = found + bias.at(0).view(size, 1, -1, *[1] * (found.dim() - 3))
    return Batch(found, 0)


def _unfolded(
    size: int, stride: Sizes, padding: Sizes, dilation: Sizes, input: Value, weight: Batch, bias: Value | None
) -> Batch:
    """Return a batched product of the filters with the input's patches, laid out as columns (im2col)."""
    filters = weight.at(0)
    kernel = filters.shape[-2:]
    samples = input if isinstance(input, Tensor) else input.at(0).flatten(0, 1)
    patches = F.unfold(samples, tuple(kernel), dilation, padding, stride)
    rows = filters.flatten(2)
    if isinstance(input, Tensor):
        found = torch.matmul(rows.flatten(0, 1), patches).unflatten(1, (size, -1)).movedim(1, 0)
    else:
        found = torch.matmul(rows.unsqueeze(1), patches.unflatten(0, (size, -1)))
    if bias is not None:
        found = found + along(bias, 0, size).view(size, 1, -1, 1)
    axes = zip(samples.shape[-2:], kernel, *(_per_axis(each, 2) for each in (stride, padding, dilation)), strict=True)
    return Batch(found.unflatten(-1, [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]), 0)


# -- model after model -------------------------------------------------------------------------------------------------


def _loop(
    function: Any, size: int, settings: Settings, full: Settings, input: Value, weight: Batch, bias: Value | None
) -> Batch:
    """Run one model after another.

    Args:
        function: of torch.
        size: the number of models.
        settings: as the function takes them.
        full: stride, padding, dilation, whether it is transposed, output padding and groups.
        input: [n, c, s...] of one model.
        weight: [f, c, s...] of one model; transposed, [c, f, s...].
        bias: [f] of one model.
    """
    stride, padding, dilation, transposed, output_padding, groups = full
    large = isinstance(input, Batch) and input.tensor.nbytes >= _LARGE_BYTES
    autocast = torch.is_autocast_enabled(weight.tensor.device.type)
    if not large or isinstance(padding, str) or autocast:
        return loop(function, size, input, weight, bias, *settings)
    # torch.stack would read all results again after they have left the caches.
    stride, padding, dilation, output_padding = (
        _per_axis(each, len(weight.shape) - 2) for each in (stride, padding, dilation, output_padding)
    )
    operands = (None if value is None else along(value, 0, size) for value in (input, weight, bias))
    return Batch(_LoopInPlace.apply(*operands, (stride, padding, dilation, transposed, output_padding, groups)), 0)


class _LoopInPlace(torch.autograd.Function):
    """A loop over [B, n, c, s...] that copies each model's result and gradients while they are in the caches."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
        """Convolve one model after another."""
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = settings
        results = _results(x, weight, bias, settings)
        first = next(results)
        found = first.new_empty(len(x), *first.shape)
        for out, result in zip(found.unbind(), chain([first], results), strict=True):
            out.copy_(result)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Differentiate one model after another."""
        gradient, (x, weight, bias), settings = gradients[0], ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled():
            return differentiable_gradients(ctx, _stacked, gradient, (x, weight, bias), settings)
        needed, filters = list(ctx.needs_input_grad[:3]), [gradient.shape[2]]
        shapes = x.shape, weight.shape, (len(x), *filters)
        found = [x.new_empty(shape) if need else None for shape, need in zip(shapes, needed, strict=True)]
        outs = zip(*((None,) * len(x) if each is None else each.unbind() for each in found), strict=True)
        for out, above, one, own in zip(outs, gradient.unbind(), x.unbind(), weight.unbind(), strict=True):
            parts = torch.ops.aten.convolution_backward.default(above, one, own, filters, *settings, needed)
            for place, values in zip(out, parts, strict=True):
                if place is not None:
                    place.copy_(values)
        return *found, None


def _results(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Iterator[Tensor]:
    biases = (None,) * len(x) if bias is None else bias.unbind()
    return (torch.convolution(*own, *settings) for own in zip(x.unbind(), weight.unbind(), biases, strict=True))


def _stacked(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings) -> Tensor:
    return torch.stack(list(_results(x, weight, bias, settings)))


# -- filters of size one: a matrix product at every position -----------------------------------------------------------


def _is_pointwise(weight: Value, stride: Sizes, padding: Sizes | str, groups: int) -> bool:
    ones, unpadded = (1,) * len(weight.shape[2:]), padding == "valid" or _all_equal(padding, 0)
    return weight.shape[2:] == ones and groups == 1 and padding != "same" and _all_equal(stride, 1) and unpadded


def _all_equal(values: Sizes | str, wanted: int) -> bool:
    return all(value == wanted for value in ((values,) if isinstance(values, int) else values))


def _per_axis(values: Sizes, axes: int) -> tuple[int, ...]:
    """Expand one number that stands for all axes."""
    return (values,) * axes if isinstance(values, int) else tuple(values) * (axes // len(values))


def _pointwise(size: int, input: Value, weight: Batch, bias: Value | None) -> Batch:
    """Multiply each model's weights with the channels at every position; a shared input is not copied.

    Args:
        size: the number of models.
        input: [n, c, s...] of one model.
        weight: [f, c, 1...] of one model.
        bias: [f] of one model.
    """
    if isinstance(input, Tensor):
        x, axis = input.contiguous().expand(size, *input.shape), 0
    else:
        x, axis = contiguous(input)
    matrix, own = weight.at(0).flatten(2), None if bias is None else along(bias, 0, size)
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or x.dtype not in (torch.float32, torch.float64):
        found = _beside(matrix, axis) @ x.flatten(3)
        found = found if own is None else found + _beside(own, axis).unsqueeze(-1)
        return Batch(found.unflatten(3, x.shape[3:]), axis)
    return Batch(_Pointwise.apply(x, matrix, own, axis), axis)


def _beside(value: Tensor, axis: int) -> Tensor:
    """View [B, ...] so that it broadcasts with [B, n, ...] (axis 0) or [n, B, ...] (axis 1)."""
    return value if axis else value.unsqueeze(1)


class _Pointwise(torch.autograd.Function):
    """Products written in place, one sample or one model at a time: `matmul` would copy weights or move axes.

    x is [B, n, c, s...] for axis 0 and [n, B, c, s...] for axis 1; weight is [B, f, c], bias [B, f].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, axis: int) -> Tensor:
        """Multiply along the first axis of x, whichever that is."""
        ctx.save_for_backward(x, weight)
        ctx.axis = axis
        found = x.new_empty(*x.shape[:2], weight.shape[1], *x.shape[3:])
        column = None if bias is None else bias.unsqueeze(2)
        for place, (one, out) in enumerate(zip(x.flatten(3), found.flatten(3), strict=True)):
            own, shift = weight, column
            if axis == 0:
                own, shift = weight[place].expand(len(one), -1, -1), None if column is None else column[place]
            if shift is None:
                torch.bmm(own, one, out=out)
            else:
                torch.baddbmm(shift, own, one, out=out)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Multiply again; differentiable where a graph is asked for."""
        gradient, (x, weight), axis = gradients[0].contiguous(), ctx.saved_tensors, ctx.axis
        needed: Sequence[bool] = ctx.needs_input_grad
        if torch.is_grad_enabled():
            rows, columns = gradient.flatten(3), x.flatten(3)
            of_x = (_beside(weight.transpose(1, 2), axis) @ rows).view_as(x)
            of_weight = (rows @ columns.transpose(2, 3)).sum(1 - axis)
            return of_x, of_weight, rows.sum((1 - axis, 3)) if needed[2] else None, None
        of_x = x.new_empty(x.shape) if needed[0] else None
        of_weight = weight.new_zeros(weight.shape) if needed[1] else None
        of_bias = weight.new_zeros(weight.shape[:2]) if needed[2] else None
        transposed = weight.transpose(1, 2)
        # All three gradients of a part at once, while it is in the caches.
        for place, (above, one) in enumerate(zip(gradient.flatten(3), x.flatten(3), strict=True)):
            if of_x is not None:
                own = transposed if axis else transposed[place].expand(len(above), -1, -1)
                torch.bmm(own, above, out=of_x[place].flatten(2))
            if of_weight is not None and axis:
                of_weight.baddbmm_(above, one.transpose(1, 2))
            elif of_weight is not None:
                of_weight[place].addbmm_(above, one.transpose(1, 2))
            if of_bias is not None:
                (of_bias if axis else of_bias[place]).add_(above.sum(2 if axis else (0, 2)))
        return of_x, of_weight, of_bias, None


# -- pooling -----------------------------------------------------------------------------------------------------------


@rule(*_POOLS)
def pool(context: Context, function: Any, input: Value, *args: Any, **kwargs: Any) -> Any:
    """Pool with the models folded into the samples or the channels, whichever needs no copy: channels do not mix."""
    if not isinstance(input, Batch):
        return function(input, *args, **kwargs)
    spatial = next(axes for axes in (1, 2, 3) if f"pool{axes}d" in function.__name__)
    if len(input.shape) != spatial + 2:  # of a single sample: the models take the place of the samples
        return pytree.tree_map(lambda leaf: Batch(leaf, 0), function(input.at(0), *args, **kwargs))
    axis = min(input.axis, 1)
    found = function(input.at(axis).flatten(axis, axis + 1), *args, **kwargs)
    return pytree.tree_map(lambda leaf: Batch(leaf.unflatten(axis, (context.size, -1)), axis), found)
