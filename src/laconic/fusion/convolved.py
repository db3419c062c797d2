"""Convolutions by kernels of our own: every model's results are written where the array has them.

Derivatives of derivatives are by torch's arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.fusion.batch import Batch, Value, along, dense
from laconic.fusion.derivatives import Gradients, again
from laconic.fusion.pointwise import Steps, of_each
from laconic.kernels import convolved as kernels
from laconic.kernels.convolved import Stepping
from laconic.kernels.reference import convolved as by_torch


def convolved(
    size: int,
    stride: Steps,
    padding: Steps,
    dilation: Steps,
    input: Value,
    weight: Value,
    bias: Value | None,
) -> Batch:
    """Each model's convolution of [n, channels, places...], with filters [filters, channels, places...]."""
    x, axis, *affine = _laid_out(size, input, weight, bias)
    return Batch(_Convolved.apply(x, *affine, axis, _steps(weight, stride, padding, dilation)), axis)


def convolved_back(
    size: int,
    stride: Steps,
    padding: Steps,
    dilation: Steps,
    more: Steps,
    input: Value,
    weight: Value,
    bias: Value | None,
) -> Batch:
    """Each model's transposed convolution of [n, channels, places...], with filters [channels, filters, places...].

    It is longer by `more` than the window needs.
    """
    x, axis, *affine = _laid_out(size, input, weight, bias)
    steps, window = _steps(weight, stride, padding, dilation), weight.shape[2:]
    lengths = zip(input.shape[2:], window, of_each(more, len(window)), *steps, strict=True)
    wanted = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 + extra for n, k, extra, s, p, d in lengths)
    return Batch(_Transposed.apply(x, *affine, wanted, axis, steps), axis)


def _laid_out(size: int, input: Value, weight: Value, bias: Value | None) -> Any:
    """As the kernels take it, and the models' axis; what is shared is not repeated."""
    x, axis = dense(input) if isinstance(input, Batch) else (along(input.contiguous(), 0, size), 0)
    return x, axis, *(None if value is None else along(value, 0, size).contiguous() for value in (weight, bias))


def _steps(weight: Value, *every: Steps) -> Stepping:
    return Stepping(*(of_each(each, len(weight.shape) - 2) for each in every))


class _Convolved(torch.autograd.Function):
    """Of [models, n, channels, places...], or with samples first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, shift: Tensor | None, axis: int, steps: Stepping) -> Tensor:
        """All models by one call."""
        ctx.save_for_backward(x, filters, shift)
        ctx.settings = axis, steps
        return kernels.convolve(x, filters, shift, axis=axis, steps=steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """The same again, to images and to filters, while a model's gradient is in the caches."""
        gradient, (x, filters, shift), (axis, steps) = gradients[0], ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled():
            return again(ctx, by_torch.convolve, gradient, (x, filters, shift), axis, steps)
        trained, *asked = ctx.needs_input_grad[:3]
        image, *found = kernels.convolve_back(
            gradient.contiguous(), x, filters, axis=axis, steps=steps, trained=trained
        )
        return image, *(each if wanted else None for each, wanted in zip(found, asked, strict=True)), None, None


class _Transposed(torch.autograd.Function):
    """Of [models, n, channels, places...], or with samples first."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, filters: Tensor, shift: Tensor | None, size: tuple[int, ...], axis: int, steps: Stepping
    ) -> Tensor:
        """All models by one call."""
        ctx.save_for_backward(x, filters, shift)
        ctx.settings = size, axis, steps
        return kernels.convolve_transposed(x, filters, shift, size=size, axis=axis, steps=steps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """What was an image is what is sent, and the reverse."""
        gradient, (x, filters, shift), (size, axis, steps) = gradients[0], ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled():
            return again(ctx, by_torch.convolve_transposed, gradient, (x, filters, shift), size, axis, steps)
        above, asked, how = gradient.contiguous(), ctx.needs_input_grad, {"axis": axis, "steps": steps}
        image = kernels.convolve(above, filters, None, **how) if asked[0] else None
        found = kernels.filters_between(above, x, window=filters.shape[3:], **how)[0] if asked[1] else None
        of_shift = above.sum((1 - axis, *range(3, above.dim()))) if asked[2] else None
        return image, found, of_shift, None, None, None
