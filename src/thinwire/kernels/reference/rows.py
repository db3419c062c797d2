"""One step of the optimizers of many models, by torch: tensors [models, ...], each model with its own numbers.

In fp64 torch's own roots may miss the last bit, and so may Adam; all else is bit by bit what the compiled kernels do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.reference.bits import rooted


def adam_rows_(
    x: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, numbers: Tensor, going: Tensor
) -> None:
    """Adam's; `numbers` [models, 9] are those of `thinwire.kernels.rows.adam_rows_`."""
    shrink, decay, share, rest, keep, take, scale, floor, step = _columns(numbers, x)
    g = torch.where(decay != 0, gradient + decay * x, gradient)
    way = g - mean
    m = torch.where(share < 0.5, mean + share * way, g - rest * way)
    v = keep * square + take * (g * g)
    w = v if most is None else torch.maximum(most, v)
    root = rooted(w) if w.dtype == torch.float32 else w.sqrt()
    moved = x * shrink - step * (m / (root * scale + floor))
    _put([(x, moved), (mean, m), (square, v), *([] if most is None else [(most, w)])], going)


def sgd_rows_(x: Tensor, gradient: Tensor, momentum: Tensor, numbers: Tensor, going: Tensor) -> None:
    """Those of stochastic gradient descent; `numbers` [models, 5] are those of `thinwire.kernels.rows.sgd_rows_`."""
    decay, keep, take, ahead, step = _columns(numbers, x)
    g = torch.where(decay != 0, gradient + decay * x, gradient)
    u = torch.where(keep != 0, keep * momentum + take * g, momentum)
    direction = torch.where(keep == 0, g, torch.where(ahead != 0, g + keep * u, u))
    _put([(x, x - step * direction), (momentum, u)], going)


def _columns(numbers: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """Each number as [models, 1, ...], in the dtype of x."""
    return numbers.to(x).view(len(x), -1, *[1] * (x.dim() - 1)).unbind(1)


def _put(pairs: Sequence[tuple[Tensor, Tensor]], going: Tensor) -> None:
    """Give the rows that are going their new values; the others keep theirs, bitwise."""
    for kept, made in pairs:
        kept.copy_(torch.where(going.to(kept.device).view(-1, *[1] * (kept.dim() - 1)), made, kept))
