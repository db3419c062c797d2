"""Losses of all models at once, every model's with its own denominator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.fusion.batch import Batch, Value, along, each
from laconic.fusion.routing import Context, rule


@rule(F.cross_entropy)
def cross_entropy(
    context: Context,
    function: Any,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """All samples of all models at once, then one mean per model."""

    def loss(x: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        return F.cross_entropy(x, y, w, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)

    if _odd(input, target, weight, size_average, reduce):
        rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return each(function, context.size, input, target, *rest)
    classes = None if target_is_soft(input, target) else ignore_index
    return _reduced(context, loss, (input, target, weight), classes, reduction)


@rule(F.nll_loss)
def nll_loss(
    context: Context,
    function: Any,
    input: Value,
    target: Value,
    weight: Value | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    """As `cross_entropy`, of logarithms of probabilities."""

    def loss(x: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
        return F.nll_loss(x, y, w, ignore_index=ignore_index, reduction="none")

    if _odd(input, target, weight, size_average, reduce):
        rest = (weight, size_average, ignore_index, reduce, reduction)
        return each(function, context.size, input, target, *rest)
    return _reduced(context, loss, (input, target, weight), ignore_index, reduction)


def target_is_soft(input: Value, target: Value) -> bool:
    """Whether targets are probabilities of classes, and not classes."""
    return len(target.shape) == len(input.shape)


def _odd(input: Value, target: Value, weight: Value | None, *old: bool | None) -> bool:
    """Single samples, weights of a model's own, and the old names of reductions go by the plain loop."""
    return len(input.shape) < 2 or isinstance(weight, Batch) or any(value is not None for value in old)


def _reduced(
    context: Context, loss: Callable[..., Tensor], values: tuple[Any, ...], ignored: int | None, reduction: str
) -> Batch:
    size, (input, target, weight) = context.size, values
    x, y = along(input, 0, size), along(target, 0, size)
    every = loss(x.flatten(0, 1), y.flatten(0, 1), weight).unflatten(0, (size, -1))
    if reduction == "none":
        return Batch(every, 0)
    sums = every.flatten(1).sum(1)
    if reduction == "sum":
        return Batch(sums, 0)
    return Batch(sums / _denominators(y, weight, ignored).to(sums), 0)


def _denominators(target: Tensor, weight: Tensor | None, ignored: int | None) -> Tensor:
    """What each model's mean divides by: the samples, or the weights of the classes they are of."""
    if ignored is None:
        # Probabilities stand along the classes' axis, and each position counts once.
        return torch.tensor(target[0].numel() / target.shape[2])
    counted = (target != ignored).flatten(1)
    if weight is None:
        return counted.sum(1)
    return (weight[target.flatten(1).clamp(0, weight.shape[0] - 1)] * counted).sum(1)
