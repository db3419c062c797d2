# SPDX-License-Identifier: Apache-2.0
"""One optimizer step of many models in torch: tensors [models, ...], each model with its own numbers.

The compiled kernels give the same bits, except for Adam in fp64: the last bit of torch's square roots may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.kernels.reference.bits import exact_sqrt


def adam_rows_(
    x: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, most: Tensor | None, numbers: Tensor, active: Tensor
) -> None:
    """Take a step of Adam; `numbers` [models, 9] as in `thinwire.core.kernels.rows.adam_rows_`."""
    shrink, decay, weight, beta1, beta2, square_weight, scale, eps, rate = _columns(numbers, x)
    g = torch.where(decay != 0, gradient + decay * x, gradient)
    difference = g - mean
    m = torch.where(weight < 0.5, mean + weight * difference, g - beta1 * difference)
    v = beta2 * square + square_weight * (g * g)
    w = v if most is None else torch.maximum(most, v)
    root = exact_sqrt(w) if w.dtype == torch.float32 else w.sqrt()
    new = x * shrink - rate * (m / (root * scale + eps))
    _write([(x, new), (mean, m), (square, v), *([] if most is None else [(most, w)])], active)


def sgd_rows_(x: Tensor, gradient: Tensor, momentum: Tensor, numbers: Tensor, active: Tensor) -> None:
    """Take a step of SGD; `numbers` [models, 5] as in `thinwire.core.kernels.rows.sgd_rows_`."""
    decay, mu, weight, nesterov, rate = _columns(numbers, x)
    g = torch.where(decay != 0, gradient + decay * x, gradient)
    u = torch.where(mu != 0, mu * momentum + weight * g, momentum)
    direction = torch.where(mu == 0, g, torch.where(nesterov != 0, g + mu * u, u))
    _write([(x, x - rate * direction), (momentum, u)], active)


def _columns(numbers: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """View each number as [models, 1, ...], in the dtype of x."""
    return numbers.to(x.device, x.dtype).view(len(x), -1, *[1] * (x.dim() - 1)).unbind(1)


def _write(pairs: Sequence[tuple[Tensor, Tensor]], active: Tensor) -> None:
    """Write new values into the active rows; the others are unchanged, bitwise."""
    for old, new in pairs:
        old.copy_(torch.where(active.to(old.device).view(-1, *[1] * (old.dim() - 1)), new, old))
