"""Derivatives of what has a backward pass of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Gradients = tuple[Tensor | None, ...]


def again(
    ctx: Any, plain: Callable[..., Tensor], gradient: Tensor, inputs: Sequence[Tensor | None], *settings: Any
) -> Gradients:
    """First derivatives that can be differentiated, and None for each of the settings."""
    asked = ctx.needs_input_grad[: len(inputs)]
    wanted = [x for x, needed in zip(inputs, asked, strict=True) if needed and x is not None]
    found = iter(torch.autograd.grad(plain(*inputs, *settings), wanted, gradient, create_graph=True))
    return *(next(found) if needed else None for needed in asked), *[None] * len(settings)
