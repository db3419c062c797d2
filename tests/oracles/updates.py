# SPDX-License-Identifier: Apache-2.0
"""Workers' own AdamW, and methods under any optimizer, straight from their papers: workers on the leading axis.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tests.oracles.common import Gradient
from tests.oracles.leader import Losses, best_of


class Update(Protocol):
    """What every worker's own optimizer adds to its parameters, given them, its gradient and the step."""

    rates: Sequence[float | Tensor]

    def __call__(self, x: Tensor, g: Tensor, k: int) -> Tensor: ...


class AdamW:
    """AdamW, Algorithm 2 of Loshchilov and Hutter, with torch's defaults."""

    def __init__(self, rates: Sequence[float | Tensor], *, decay: float = 0.01) -> None:
        self.rates, self.decay = rates, decay
        self.first: Tensor | float = 0.0
        self.second: Tensor | float = 0.0

    def __call__(self, x: Tensor, g: Tensor, k: int) -> Tensor:
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        first, second = self.first / (1 - 0.9 ** (k + 1)), self.second / (1 - 0.999 ** (k + 1))
        return -self.rates[k] * (self.decay * x + first / (second.sqrt() + 1e-8))


def mean_of(mean: Callable[[Tensor, int], Tensor], gradient: Gradient, x: Tensor, update: Update, steps: int) -> Tensor:
    """Every worker's own update, along whatever `mean` makes of all gradients; it is given them and the step."""
    for k in range(steps):
        x = x + update(x, mean(gradient(x, k), k).expand_as(x), k)
    return x


def leader_gradient(
    gradient: Gradient, losses: Losses, x: Tensor, update: Update, steps: int, *, pull: float
) -> Tensor:
    """Leader gradient descent: the pull and the gradient, both at the same parameters."""
    for k in range(steps):
        z = x[best_of(losses(x, k).float(), range(len(x)))]
        x = x + update(x, gradient(x, k), k) - update.rates[k] * pull * (x - z)
    return x


def streamed_overlap(
    gradient: Gradient,
    x: Tensor,
    update: Update,
    steps: int,
    *,
    fragments: int,
    period: int,
    pull: float,
    momentum: float,
) -> Tensor:
    """Overlap Local-SGD on fragments of the vector, whose rounds begin one after another within a period."""
    cuts = [slice(f * x.shape[1] // fragments, (f + 1) * x.shape[1] // fragments) for f in range(fragments)]
    anchor, sent = x.mean(0), x.mean(0)
    velocity = torch.zeros_like(anchor)
    for k in range(1, steps + 1):
        x = x + update(x, gradient(x, k - 1), k - 1)
        for f, cut in enumerate(cuts):
            if (k + f * period // fragments) % period:
                continue
            velocity[cut] = momentum * velocity[cut] + sent[cut] - anchor[cut]
            anchor[cut] = anchor[cut] + velocity[cut]
            x[:, cut] = (1 - pull) * x[:, cut] + pull * anchor[cut]
            sent[cut] = x[:, cut].mean(0)
    return x
