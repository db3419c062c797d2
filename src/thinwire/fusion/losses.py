"""Losses of all models at once, every model's with its own denominator."""

from __future__ import annotations

from collections.abc import Callable
from math import log, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.fusion.autotune import Way, fastest
from thinwire.fusion.batch import Batch, Value, along, each
from thinwire.fusion.routing import Context, rule


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
    soft = target_is_soft(input, target)
    ways: dict[str, Way] = {"whole": _whole(loss, context.size)}
    if _is_plain(input) and not (soft or label_smoothing or weight is not None):
        ways = {"by hand": _by_hand(ignore_index, context.size), **ways}
    every = fastest("cross_entropy", ways, (input, target, weight), (ignore_index, label_smoothing))
    return _reduced(context, every, target, weight, None if soft else ignore_index, reduction)


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
    every = _whole(loss, context.size)(input, target, weight)
    return _reduced(context, every, target, weight, ignore_index, reduction)


def target_is_soft(input: Value, target: Value) -> bool:
    """Whether targets are probabilities of classes, and not classes."""
    return len(target.shape) == len(input.shape)


def _odd(input: Value, target: Value, weight: Value | None, *old: bool | None) -> bool:
    """Single samples, weights of a model's own, and the old names of reductions go by the plain loop."""
    return len(input.shape) < 2 or isinstance(weight, Batch) or any(value is not None for value in old)


def _is_plain(input: Value) -> bool:
    """Whether there is a CPU's softmax to be spared, and no dtype to be cast to."""
    tensor = _tensor(input)
    known = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    return known and not torch.is_autocast_enabled("cpu")


def _whole(loss: Callable[..., Tensor], size: int) -> Way:
    """Torch's own loss of every sample, with the models as more samples: [models, samples, ...]."""

    def way(input: Value, target: Value, weight: Tensor | None) -> Batch:
        x, y = along(input, 0, size), along(target, 0, size)
        return Batch(loss(x.flatten(0, 1), y.flatten(0, 1), weight).unflatten(0, (size, -1)), 0)

    return way


def _by_hand(ignored: int, size: int) -> Way:
    """`_Surprise`: on a CPU torch's softmax over few classes takes several times as long as its parts."""

    def way(input: Value, target: Value, weight: None) -> Batch:
        counted = _tensor(target) != ignored
        if bool(counted.all()):
            return Batch(_Surprise.apply(along(input, 0, size), along(target, 0, size)), 0)
        there = torch.where(counted, _tensor(target), 0)
        axis = target.axis if isinstance(target, Batch) else None
        place, mask = (there, counted) if axis is None else (Batch(there, axis), Batch(counted, axis))
        found = _Surprise.apply(along(input, 0, size), along(place, 0, size))
        return Batch(torch.where(along(mask, 0, size), found, 0.0), 0)

    return way


def _tensor(value: Value) -> Tensor:
    return value.tensor if isinstance(value, Batch) else value


class _Surprise(torch.autograd.Function):
    """The negative logarithm of the softmax at each sample's class; classes stand along axis 2."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Keep the probabilities; the logits are kept only for derivatives of derivatives."""
        place = target.unsqueeze(2)
        shifted = logits - logits.amax(2, keepdim=True)
        there = shifted.gather(2, place)
        shares = _exponentials_(shifted)
        sums = shares.sum(2, keepdim=True)
        ctx.save_for_backward(logits, shares.div_(sums), place)
        return (sums.log_() - there).squeeze(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The probabilities, less one at the class."""
        logits, shares, place = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(2)
        if torch.is_grad_enabled():
            shares = torch.softmax(logits, 2)
        return (shares * gradient).scatter_add(2, place, -gradient), None


def _exponentials_(x: Tensor) -> Tensor:
    """In place; what would be less than twice the least normal number is zero, as all below that is computed slowly."""
    least = 2 * torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=log(least)).exp_(), 1.01 * least, 0.0)


def _reduced(
    context: Context, every: Batch, target: Value, weight: Value | None, ignored: int | None, reduction: str
) -> Batch:
    if reduction == "none":
        return every
    sums = every.at(0).flatten(1).sum(1)
    if reduction == "sum":
        return Batch(sums, 0)
    return Batch(sums / _denominators(context, target, weight, ignored).to(sums), 0)


def _denominators(context: Context, target: Value, weight: Value | None, ignored: int | None) -> Tensor:
    """What each model's mean divides by: the samples, or the weights of the classes they are of."""
    if ignored is None:
        # Probabilities stand along the classes' axis, and each position counts once.
        return torch.tensor(prod(target.shape) / target.shape[1])
    if weight is None and isinstance(target, Tensor):
        return (target != ignored).sum()
    classes = along(target, 0, context.size).flatten(1)
    counted = classes != ignored
    if weight is None:
        return counted.sum(1)
    weights = _tensor(weight)
    return (weights[classes.clamp(0, weights.shape[0] - 1)] * counted).sum(1)
