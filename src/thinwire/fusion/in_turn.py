"""Convolutions of one model after another, each put into its place while it is in the caches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from thinwire.fusion.batch import Batch, Value, along
from thinwire.fusion.derivatives import Gradients, again
from thinwire.fusion.pointwise import of_each

Settings = tuple[Any, ...]
_backward = torch.ops.aten.convolution_backward.default


def in_turn(size: int, settings: Settings, input: Value, weight: Value, bias: Value | None) -> Batch:
    """Each model's convolution.

    Args:
        size: the number of models.
        settings: stride, padding, dilation, whether it is transposed, output padding, groups, as `torch.convolution`
            takes them; but a number may stand for as many as there are axes of places.
        input: [n, channels, places...] of one model.
        weight: [filters, channels, places...] of one model; transposed, [channels, filters, places...].
        bias: [filters] of one model.
    """
    stride, padding, dilation, transposed, output_padding, groups = settings
    stride, padding, dilation, output_padding = (
        of_each(steps, len(weight.shape) - 2) for steps in (stride, padding, dilation, output_padding)
    )
    every = (None if value is None else along(value, 0, size) for value in (input, weight, bias))
    return Batch(_InTurn.apply(*every, (stride, padding, dilation, transposed, output_padding, groups)), 0)


class _InTurn(torch.autograd.Function):
    """Of [models, n, channels, places...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None, settings: Settings) -> Tensor:
        """One result after another."""
        ctx.save_for_backward(x, weight, shift)
        ctx.settings = settings
        results = _results(x, weight, shift, settings)
        first = next(results)
        found = first.new_empty(len(x), *first.shape)
        for into, result in zip(found.unbind(), chain([first], results), strict=True):
            into.copy_(result)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        """One model after another again."""
        gradient, (x, weight, shift), settings = gradients[0], ctx.saved_tensors, ctx.settings
        if torch.is_grad_enabled():
            return again(ctx, _stacked, gradient, (x, weight, shift), settings)
        asked, filters = list(ctx.needs_input_grad[:3]), [gradient.shape[2]]
        shapes = x.shape, weight.shape, (len(x), *filters)
        every = [x.new_empty(shape) if needed else None for shape, needed in zip(shapes, asked, strict=True)]
        places = zip(*((None,) * len(x) if each is None else each.unbind() for each in every), strict=True)
        for into, above, one, own in zip(places, gradient.unbind(), x.unbind(), weight.unbind(), strict=True):
            for place, values in zip(into, _backward(above, one, own, filters, *settings, asked), strict=True):
                if place is not None:
                    place.copy_(values)
        return *every, None


def _results(x: Tensor, weight: Tensor, shift: Tensor | None, settings: Settings) -> Iterator[Tensor]:
    shifts = (None,) * len(x) if shift is None else shift.unbind()
    return (torch.convolution(*own, *settings) for own in zip(x.unbind(), weight.unbind(), shifts, strict=True))


def _stacked(x: Tensor, weight: Tensor, shift: Tensor | None, settings: Settings) -> Tensor:
    return torch.stack(list(_results(x, weight, shift, settings)))
