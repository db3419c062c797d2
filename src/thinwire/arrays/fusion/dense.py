# SPDX-License-Identifier: Apache-2.0
"""Linear layers, embeddings and a few tensor operations of all models at once.

Shapes: B models, n rows of one model's input, `in` and `out` features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.autotune import Implementation, has_kernel, run_fastest
from thinwire.arrays.fusion.batch import Batch, Value, along, loop
from thinwire.arrays.fusion.routing import Context, Gradients, rule
from thinwire.core.kernels.base import STREAM_BYTES
from thinwire.core.kernels.linear import weight_gradients
from thinwire.errors import ConfigError


@rule(F.linear)
def linear(context: Context, function: Any, input: Value, weight: Value, bias: Value | None = None) -> Batch:
    r"""$x_b W_b^\top + \beta_b$: one product with all weights if x is shared, else a batched product."""
    size = context.size
    if not isinstance(weight, Batch):
        x = along(input, 0, size)
        if isinstance(bias, Batch):
            return Batch(F.linear(x, weight) + _beside_rows(bias.at(0), len(input.shape)), 0)
        return Batch(F.linear(x, weight, bias), 0)
    candidates: dict[str, Implementation] = {
        "batched": partial(_batched, size),
        "loop": partial(loop, function, size),
    }
    if not isinstance(input, Batch):
        candidates = {"side by side": partial(_side_by_side, size), **candidates}
    # The kernel writes the weights' gradient past the caches: it pays where that is far more than the caches hold.
    if weight.tensor.nbytes >= STREAM_BYTES and has_kernel(input, weight):
        candidates["kernel"] = partial(_batched, size, kernel=True)
    return run_fastest("linear", candidates, (input, weight, bias))


def _beside_rows(bias: Tensor, dimensions: int) -> Tensor:
    """View [B, features] so that it broadcasts with [B, ...], where one model's part has so many dimensions."""
    return bias.view(bias.shape[0], *[1] * (dimensions - 1), bias.shape[1])


def _autocast(x: Tensor) -> bool:
    """Return True if autocast is on: its casts must be part of the graph, so torch's own functions are used."""
    return torch.is_autocast_enabled(x.device.type)


def _side_by_side(size: int, input: Tensor, weight: Batch, bias: Value | None) -> Batch:
    stacked = weight.at(0)
    biases = None if bias is None else along(bias, 0, size).reshape(-1)
    x = input.reshape(-1, input.shape[-1])
    found = (F.linear if _autocast(x) else _SideBySide.apply)(x, stacked.reshape(-1, stacked.shape[2]), biases)
    return Batch(found.view(*input.shape[:-1], size, stacked.shape[1]), input.dim() - 1)


class _SideBySide(torch.autograd.Function):
    """One product of x [n, in] with all weights [B * out, in]; their gradient is laid out as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, and keep the factors."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Two products and a sum, which can be differentiated."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def _batched(size: int, input: Value, weight: Batch, bias: Value | None, kernel: bool = False) -> Batch:
    x, stacked = along(input, 0, size), weight.at(0)
    lead = x.shape[1:-1]
    x = x if len(lead) == 1 else x.reshape(size, -1, x.shape[-1])
    biases = None if bias is None else along(bias, 0, size)
    if _autocast(x):
        found = _batched_product(x, stacked, biases)
    else:
        found = _Batched.apply(x, stacked, biases, kernel)
    return Batch(found if len(lead) == 1 else found.view(size, *lead, stacked.shape[1]), 0)


def _batched_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


class _Batched(torch.autograd.Function):
    """The product of x [B, n, in] with weight [B, out, in], and bias [B, out].

    torch's own gradient of the weights is transposed, and autograd would copy it into the layout of the weights.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernel: bool) -> Tensor:
        """Multiply, and keep the factors."""
        ctx.save_for_backward(x, weight)
        ctx.kernel = kernel
        return _batched_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """Two batched products and a sum; by torch where a graph is asked for."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = torch.bmm(gradient, weight) if needs_x else None
        if ctx.kernel and not torch.is_grad_enabled():
            given = x.contiguous() if x.stride(0) else x[:1].contiguous().expand_as(x)
            of_weight, of_bias = weight_gradients(given, gradient.contiguous())
            return of_x, of_weight if needs_weight else None, of_bias if needs_bias else None, None
        of_weight = torch.bmm(gradient.transpose(1, 2), x) if needs_weight else None
        return of_x, of_weight, gradient.sum(1) if needs_bias else None, None


@rule(F.bilinear)
def bilinear(context: Context, function: Any, *args: Any, **kwargs: Any) -> Batch:
    """Compute model after model, as vmap does with a warning."""
    return loop(function, context.size, *args, **kwargs)


@rule(F.embedding)
def embedding(
    context: Context,
    function: Any,
    input: Value,
    weight: Value,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Batch:
    """Look up rows in one table that holds the models' tables below each other; no padding row has a gradient."""
    if sparse or max_norm is not None:
        raise ConfigError(
            f"Embedding(max_norm={max_norm}, sparse={sparse}): a fused table is dense, and lookups do not change it. "
            "Pass loop=[...] with the layer's name"
        )
    rest = (padding_idx, None, norm_type, scale_grad_by_freq)
    if not isinstance(weight, Batch):
        return Batch(function(along(input, 0, context.size), weight, *rest), 0)
    candidates: dict[str, Implementation] = {
        "one table": partial(_one_table, context.size, padding_idx, scale_grad_by_freq),
        "loop": lambda index, table: loop(function, context.size, index, table, *rest),
    }
    return run_fastest("embedding", candidates, (input, weight), rest)


def _one_table(size: int, padding: int | None, scaled: bool, input: Value, weight: Batch) -> Batch:
    index, tables = along(input, 0, size), weight.at(0)
    offset = torch.arange(size, device=index.device).view(size, *[1] * (index.dim() - 1)) * tables.shape[1]
    found = F.embedding(index + offset, tables.flatten(0, 1), scale_grad_by_freq=scaled)
    if padding is None:
        return Batch(found, 0)
    # Each model has a padding row, and torch's function knows only one.
    padded = (index == padding % tables.shape[1]).unsqueeze(-1)
    return Batch(torch.where(padded, found.detach(), found), 0)


@rule(F.prelu)
def prelu(context: Context, function: Any, input: Value, weight: Value) -> Batch:
    """Apply each model's slopes to its own channels."""
    size = context.size

    def where(x: Value, slopes: Value) -> Batch:
        every, own = along(x, 0, size), along(slopes, 0, size)
        if every.dim() == 1:
            return Batch(torch.where(every > 0, every, own[:, 0] * every), 0)
        # Channels are one model's second axis, or its only one.
        behind = max(every.dim() - 3, 0)
        own = own.view(size, *[1] * (every.dim() - 2 - behind), -1, *[1] * behind)
        return Batch(torch.where(every > 0, every, own * every), 0)

    return run_fastest("prelu", {"where": where, "loop": partial(loop, function, size)}, (input, weight))


# -- operations that vmap supports too, but with the models moved to the front or with more passes over memory ---------


@rule(torch.Tensor.view)
def view(context: Context, function: Any, input: Batch, *shape: Any, **kwargs: Any) -> Any:
    """Reshape each model's part; copy where it does not lie in memory as the model's own tensor would."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not all(isinstance(length, int) for length in sizes):
        return loop(function, context.size, input, *shape, **kwargs)
    if len(input.shape) and input.axis == 1 and tuple(sizes[:1]) == input.shape[:1]:
        return Batch(input.tensor.reshape(input.shape[0], context.size, *sizes[1:]), 1)
    return Batch(input.at(0).reshape(context.size, *sizes), 0)


@rule(torch.cat)
def cat(context: Context, function: Any, tensors: Sequence[Value], dim: int = 0, *, axis: int | None = None) -> Batch:
    """Concatenate, with the models where the largest part has them, so that only smaller parts are moved."""
    dim = dim if axis is None else axis
    dimensions = len(tensors[0].shape)
    if any(len(part.shape) != dimensions for part in tensors):
        return loop(function, context.size, list(tensors), dim)
    largest = max((part for part in tensors if isinstance(part, Batch)), key=lambda part: part.tensor.numel())
    place = largest.axis
    parts = [along(part, place, context.size) for part in tensors]
    return Batch(torch.cat(parts, _axis_of(dim % dimensions, place)), place)


@rule(torch.amax, Tensor.amax)
def amax(
    context: Context,
    function: Any,
    input: Value,
    dim: int | tuple[int, ...] = (),
    keepdim: bool = False,
    *,
    axis: int | tuple[int, ...] | None = None,
) -> Batch | Tensor:
    """Find each model's greatest values along axes; equal ones share the gradient."""
    dim = dim if axis is None else axis
    if not isinstance(input, Batch):
        return function(input, dim, keepdim)
    dimensions = len(input.shape)
    if not dimensions:
        return input
    asked = dim if isinstance(dim, Sequence) else (dim,)
    own_axes = sorted({each % dimensions for each in asked} or range(dimensions))
    axes = [_axis_of(each, input.axis) for each in own_axes]
    if input.tensor.device.type == "cpu" and input.tensor.dtype in (torch.float32, torch.float64):
        found = _Amax.apply(input.tensor, axes)
        found = found if keepdim else found.squeeze(axes)
    else:
        found = input.tensor.amax(axes, keepdim)
    return Batch(found, input.axis if keepdim else input.axis - sum(each < input.axis for each in own_axes))


def _axis_of(own_axis: int, models_axis: int) -> int:
    """Return the axis of the batched tensor that is `own_axis` of one model's."""
    return own_axis + (own_axis >= models_axis)


class _Amax(torch.autograd.Function):
    """`amax` with a faster backward: torch's converts booleans to integers and divides at every entry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: list[int]) -> Tensor:
        """Return the maxima with `keepdim`."""
        found = x.amax(axes, keepdim=True)
        ctx.save_for_backward(x, found)
        ctx.axes = axes
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Give each of several equal maxima the same share."""
        x, found = ctx.saved_tensors
        with torch.no_grad():
            equal = torch.eq(x, found, out=torch.empty_like(x))
            count = equal.sum(ctx.axes, keepdim=True)
        share = gradients[0] / count
        return equal * share if torch.is_grad_enabled() else equal.mul_(share), None
