# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of all models at once; each model's mean has its own denominator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.arrays.fusion.autotune import Implementation, run_fastest
from thinwire.arrays.fusion.batch import Batch, Value, along, loop, tensor_of
from thinwire.arrays.fusion.routing import Context, rule
from thinwire.errors import ConfigError


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
    """Compute the losses of all samples of all models at once, then one mean per model."""
    loss = partial(F.cross_entropy, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    if _needs_loop(input, weight, size_average, reduce):
        rest = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        return loop(function, context.size, input, target, *rest)
    soft = len(target.shape) == len(input.shape)  # probabilities of classes instead of their indices
    candidates: dict[str, Implementation] = {"torch": _by_torch(loss, context.size)}
    if _is_plain(input) and not (soft or label_smoothing or weight is not None):
        candidates = {"in steps": _in_steps(ignore_index, context.size), **candidates}
    losses = run_fastest("cross_entropy", candidates, (input, target, weight), (ignore_index, label_smoothing))
    return _reduced(context, losses, target, weight, None if soft else ignore_index, reduction)


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
    """Compute `cross_entropy` from logarithms of probabilities."""
    loss = partial(F.nll_loss, ignore_index=ignore_index, reduction="none")
    if _needs_loop(input, weight, size_average, reduce):
        rest = (weight, size_average, ignore_index, reduce, reduction)
        return loop(function, context.size, input, target, *rest)
    losses = _by_torch(loss, context.size)(input, target, weight)
    return _reduced(context, losses, target, weight, ignore_index, reduction)


def _needs_loop(input: Value, weight: Value | None, *deprecated: bool | None) -> bool:
    """Return True if it is a single sample, has class weights of each model's own, or deprecated options."""
    return len(input.shape) < 2 or isinstance(weight, Batch) or any(value is not None for value in deprecated)


def _is_plain(input: Value) -> bool:
    """Return True if the input is on the CPU, where torch's softmax is slow, and autocast would not convert it."""
    tensor = tensor_of(input)
    known = tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    return known and not torch.is_autocast_enabled("cpu")


def _by_torch(loss: Callable[..., Tensor], size: int) -> Implementation:
    """Use torch's own loss of every sample, with the models as more samples: [models, samples, ...]."""

    def compute(input: Value, target: Value, weight: Tensor | None) -> Batch:
        x, y = along(input, 0, size), along(target, 0, size)
        return Batch(loss(x.flatten(0, 1), y.flatten(0, 1), weight).unflatten(0, (size, -1)), 0)

    return compute


def _in_steps(ignored: int, size: int) -> Implementation:
    """Use `_CrossEntropy`: on a CPU torch's softmax over few classes takes several times as long as its steps."""

    def compute(input: Value, target: Value, weight: None) -> Batch:
        counted = tensor_of(target) != ignored
        if bool(counted.all()):
            return Batch(_CrossEntropy.apply(along(input, 0, size), along(target, 0, size)), 0)
        # An ignored index may be no class; any class does, as the loss is then zeroed.
        valid = torch.where(counted, tensor_of(target), 0)
        axis = target.axis if isinstance(target, Batch) else None
        classes, mask = (valid, counted) if axis is None else (Batch(valid, axis), Batch(counted, axis))
        found = _CrossEntropy.apply(along(input, 0, size), along(classes, 0, size))
        return Batch(torch.where(along(mask, 0, size), found, 0.0), 0)

    return compute


class _CrossEntropy(torch.autograd.Function):
    """The negative log-softmax of logits [models, samples, classes, ...] at each sample's class."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        """Keep the probabilities for the backward, and the logits only for second derivatives."""
        index = target.unsqueeze(2)
        shifted = logits - logits.amax(2, keepdim=True)
        chosen = shifted.gather(2, index)
        # Subnormal numbers are computed up to fifty times as slowly: exponentials so small become zero.
        least = 2 * torch.finfo(shifted.dtype).tiny
        probabilities = torch.threshold_(shifted.clamp_(min=log(least)).exp_(), 1.01 * least, 0.0)
        sums = probabilities.sum(2, keepdim=True)
        ctx.save_for_backward(logits, probabilities.div_(sums), index)
        return (sums.log_() - chosen).squeeze(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the probabilities, less one at the class."""
        logits, probabilities, index = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(2)
        # A second derivative needs the probabilities as a function of the logits.
        if torch.is_grad_enabled():
            probabilities = torch.softmax(logits, 2)
        return (probabilities * gradient).scatter_add(2, index, -gradient), None


def _reduced(
    context: Context, losses: Batch, target: Value, weight: Value | None, ignored: int | None, reduction: str
) -> Batch:
    if reduction not in ("none", "mean", "sum"):
        raise ConfigError(f"reduction={reduction!r}: must be one of none, mean, sum")
    if reduction == "none":
        return losses
    sums = losses.at(0).flatten(1).sum(1)
    if reduction == "sum":
        return Batch(sums, 0)
    return Batch(sums / _denominators(context, target, weight, ignored).to(sums), 0)


def _denominators(context: Context, target: Value, weight: Value | None, ignored: int | None) -> Tensor:
    """Return what each model's mean is divided by: its counted samples, or the sum of their class weights."""
    if ignored is None:
        # Soft targets: one per class, but each position counts once.
        count = prod(target.shape) / target.shape[1]
        return torch.full((), count, dtype=torch.float32, device=tensor_of(target).device)
    if weight is None and isinstance(target, Tensor):
        return (target != ignored).sum()
    classes = along(target, 0, context.size).flatten(1)
    counted = classes != ignored
    if weight is None:
        return counted.sum(1)
    weights = tensor_of(weight)
    return (weights[classes.clamp(0, weights.shape[0] - 1)] * counted).sum(1)
