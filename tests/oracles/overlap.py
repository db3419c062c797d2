# SPDX-License-Identifier: Apache-2.0
"""Methods that hide their messages behind a round, straight from their papers; workers on the leading axis."""

import torch
from torch import Tensor

from tests.oracles.common import Descent, Gradient


def overlap_local_sgd(
    gradient: Gradient,
    x: Tensor,
    descend: Descent,
    steps: int,
    *,
    period: int,
    pull: float,
    momentum: float,
    lr: float = 1.0,
    nesterov: bool = False,
    delay: int | None = None,
) -> Tensor:
    """Overlap Local-SGD with the anchor's momentum; `delay` is a period unless given."""
    z, v, sent = x.mean(0), torch.zeros_like(x[0]), x.mean(0)
    for k in range(1, steps + 1):
        x = x + descend(x, gradient(x, k - 1), k - 1)
        if (k - (delay or period)) % period == 0:
            gap = sent - z
            v = momentum * v + gap
            z = z + lr * (gap + momentum * v if nesterov else v)
            x = (1 - pull) * x + pull * z
        if k % period == 0:
            sent = x.mean(0)
    return x


def cocod(gradient: Gradient, x: Tensor, descend: Descent, steps: int, *, period: int) -> Tensor:
    """CoCoD-SGD: the mean of where a round began, plus what each worker has learned in it."""
    start = x
    for k in range(1, steps + 1):
        x = x + descend(x, gradient(x, k - 1), k - 1)
        if k % period == 0:
            x = start.mean(0) + (x - start)
            start = x
    return x
