"""Linear layers and embeddings of all models at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.errors import ConfigError
from thinwire.fusion.autotune import fastest, has_kernel
from thinwire.fusion.batch import Batch, Value, along, each
from thinwire.fusion.routing import Context, rule
from thinwire.kernels.base import AWAY_BYTES
from thinwire.kernels.linear import weights_between


@rule(F.linear)
def linear(context: Context, function: Any, input: Value, weight: Value, bias: Value | None = None) -> Batch:
    r"""$x_b W_b^\top + \beta_b$: by one product with all weights where x is shared, else by a batched product."""
    size = context.size
    if not isinstance(weight, Batch):
        return _with_common_weight(input, weight, bias, size)
    ways = {"batched": partial(_batched, size), "loop": partial(each, function, size)}
    if not isinstance(input, Batch):
        ways = {"side by side": partial(_side_by_side, size), **ways}
    # A kernel has the weights' gradient: it pays where they are far more than the caches hold.
    if weight.tensor.nbytes >= AWAY_BYTES and has_kernel(input, weight):
        ways["by kernel"] = partial(_batched, size, by_kernel=True)
    return fastest("linear", ways, (input, weight, bias))


def _with_common_weight(input: Value, weight: Tensor, bias: Value | None, size: int) -> Batch:
    if not isinstance(bias, Batch):
        return Batch(F.linear(along(input, 0, size), weight, bias), 0)
    return Batch(F.linear(along(input, 0, size), weight) + _lined_up(bias.at(0), len(_shape(input))), 0)


def _shape(value: Value) -> tuple[int, ...]:
    return tuple(value.shape)


def _lined_up(bias: Tensor, dimensions: int) -> Tensor:
    """[models, features] with as many axes as one model's input has, and the models' before them."""
    return bias.view(bias.shape[0], *[1] * (dimensions - 1), bias.shape[1])


def _side_by_side(size: int, input: Tensor, weight: Batch, bias: Value | None) -> Batch:
    stacked = weight.at(0)
    every = None if bias is None else along(bias, 0, size).reshape(-1)
    x = input.reshape(-1, input.shape[-1])
    found = (F.linear if _casts(x) else _Side.apply)(x, stacked.reshape(-1, stacked.shape[2]), every)
    return Batch(found.view(*input.shape[:-1], size, stacked.shape[1]), input.dim() - 1)


class _Side(torch.autograd.Function):
    """One product with all weights, whose gradients are laid out as the weights are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
        """Keep what the products of the way back need."""
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Two products and a sum; differentiable once more."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_shift = ctx.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            gradient.t() @ x if of_weight else None,
            gradient.sum(0) if of_shift else None,
        )


def _casts(x: Tensor) -> bool:
    """Whether autocast is on: its casts are of the graph, and so must the products be."""
    return torch.is_autocast_enabled(x.device.type)


def _batched(size: int, input: Value, weight: Batch, bias: Value | None, by_kernel: bool = False) -> Batch:
    every, stacked = along(input, 0, size), weight.at(0)
    lead = every.shape[1:-1]
    x = every if len(lead) == 1 else every.reshape(size, -1, every.shape[-1])
    shift = None if bias is None else along(bias, 0, size)
    found = _product(x, stacked, shift) if _casts(x) else _Product.apply(x, stacked, shift, by_kernel)
    return Batch(found if len(lead) == 1 else found.view(size, *lead, stacked.shape[1]), 0)


def _product(x: Tensor, weight: Tensor, shift: Tensor | None) -> Tensor:
    """[models, n, in] by [models, out, in] transposed, and [models, out] added."""
    if shift is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(shift.unsqueeze(1), x, weight.transpose(1, 2))


class _Product(torch.autograd.Function):
    """`_product`, whose gradients are laid out as the weights are: torch's own come transposed, and are copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None, by_kernel: bool) -> Tensor:
        """Keep what the products of the way back need."""
        ctx.save_for_backward(x, weight)
        ctx.by_kernel = by_kernel
        return _product(x, weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Two batched products and a sum; differentiable once more."""
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x, of_weight, of_shift, _ = ctx.needs_input_grad
        back = torch.bmm(gradient, weight) if of_x else None
        if ctx.by_kernel and not torch.is_grad_enabled():
            given = x.contiguous() if x.stride(0) else x[:1].contiguous().expand_as(x)
            own, moved = weights_between(given, gradient.contiguous())
            return back, own if of_weight else None, moved if of_shift else None, None
        return (
            back,
            torch.bmm(gradient.transpose(1, 2), x) if of_weight else None,
            gradient.sum(1) if of_shift else None,
            None,
        )


@rule(torch.Tensor.view)
def view(context: Context, function: Any, input: Batch, *shape: Any, **kwargs: Any) -> Any:
    """A model's part may lie in memory otherwise than the model's own would, and is copied where it must be."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not all(isinstance(length, int) for length in sizes):
        return each(function, context.size, input, *shape, **kwargs)
    if len(input.shape) and input.axis == 1 and tuple(sizes[:1]) == input.shape[:1]:
        return Batch(input.tensor.reshape(input.shape[0], context.size, *sizes[1:]), 1)
    return Batch(input.at(0).reshape(context.size, *sizes), 0)


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
    """Rows of one table in which all models' tables stand below each other; no padding row has a gradient."""
    if sparse or max_norm is not None:
        raise ConfigError(
            f"Embedding(max_norm={max_norm}, sparse={sparse}): a fused table is dense and not changed by being read; "
            "pass loop=[...] with the layer's name"
        )
    rest = (padding_idx, None, norm_type, scale_grad_by_freq)
    if not isinstance(weight, Batch):
        return Batch(function(along(input, 0, context.size), weight, *rest), 0)
    ways = {
        "one table": partial(_one_table, context.size, padding_idx, scale_grad_by_freq),
        "loop": lambda index, table: each(function, context.size, index, table, *rest),
    }
    return fastest("embedding", ways, (input, weight), rest)


def _one_table(size: int, padding: int | None, scaled: bool, input: Value, weight: Batch) -> Batch:
    index, tables = along(input, 0, size), weight.at(0)
    first = torch.arange(size, device=index.device).view(size, *[1] * (index.dim() - 1)) * tables.shape[1]
    found = F.embedding(index + first, tables.flatten(0, 1), scale_grad_by_freq=scaled)
    if padding is None:
        return Batch(found, 0)
    # Each model has a padding row of its own, and torch's function knows of one only.
    padded = (index == padding % tables.shape[1]).unsqueeze(-1)
    return Batch(torch.where(padded, found.detach(), found), 0)


@rule(F.bilinear)
def bilinear(
    context: Context, function: Any, input1: Value, input2: Value, weight: Value, bias: Value | None = None
) -> Batch:
    """Each model's form of two inputs."""
    size = context.size

    def at_once(one: Value, other: Value, forms: Value, shift: Value | None) -> Batch:
        found = torch.einsum("b...i,boij,b...j->b...o", *(along(value, 0, size) for value in (one, forms, other)))
        return Batch(found if shift is None else found + _lined_up(along(shift, 0, size), found.dim() - 1), 0)

    ways = {"at once": at_once, "loop": partial(each, function, size)}
    return fastest("bilinear", ways, (input1, input2, weight, bias))


@rule(F.prelu)
def prelu(context: Context, function: Any, input: Value, weight: Value) -> Batch:
    """Each model's slopes on its own channels."""
    size = context.size

    def at_once(x: Value, slopes: Value) -> Batch:
        every, own = along(x, 0, size), along(slopes, 0, size)
        if every.dim() == 1:
            return Batch(torch.where(every > 0, every, own[:, 0] * every), 0)
        # Channels are a model's second axis, or its only one.
        behind = max(every.dim() - 3, 0)
        own = own.view(size, *[1] * (every.dim() - 2 - behind), -1, *[1] * behind)
        return Batch(torch.where(every > 0, every, own * every), 0)

    return fastest("prelu", {"at once": at_once, "loop": partial(each, function, size)}, (input, weight))
