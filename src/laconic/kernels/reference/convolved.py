"""Convolutions of many models by torch, one after another: what the compiled kernels must equal but for rounding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Strides, paddings and dilations, along each axis of places.
Steps = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def convolve(image: Tensor, filters: Tensor, shift: Tensor | None, axis: int, steps: Steps) -> Tensor:
    """Each model's own, put beside each other."""
    every = zip(image.unbind(axis), filters, _each(shift, filters), strict=True)
    none = [0] * len(steps[0])
    return torch.stack([torch.convolution(*own, *steps, False, none, 1) for own in every], axis)


def convolve_transposed(
    sent: Tensor, filters: Tensor, shift: Tensor | None, size: Sequence[int], axis: int, steps: Steps
) -> Tensor:
    """Each model's own, put beside each other."""
    lengths = zip(size, sent.shape[3:], filters.shape[3:], *steps, strict=True)
    more = [wanted - ((n - 1) * s - 2 * p + d * (k - 1) + 1) for wanted, n, k, s, p, d in lengths]
    every = zip(sent.unbind(axis), filters, _each(shift, filters), strict=True)
    return torch.stack([torch.convolution(*own, *steps, True, more, 1) for own in every], axis)


def filters_between(
    image: Tensor, sent: Tensor, window: Sequence[int], axis: int, steps: Steps
) -> tuple[Tensor, Tensor]:
    """Each model's own, put beside each other."""
    none, some = [0] * len(window), image.new_empty(sent.shape[2], image.shape[2], *window)
    every = zip(sent.unbind(axis), image.unbind(axis), strict=True)
    back = torch.ops.aten.convolution_backward.default
    asked = [False, True, False]
    found = [back(above, x, some, None, *steps, False, none, 1, asked)[1] for above, x in every]
    return torch.stack(found), sent.sum((1 - axis, *range(3, sent.dim())))


def _each(shift: Tensor | None, filters: Tensor) -> Sequence[Tensor | None]:
    return [None] * len(filters) if shift is None else shift.unbind()
