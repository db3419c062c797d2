# SPDX-License-Identifier: Apache-2.0
"""Workers' own AdamW, and methods around workers' own optimizers: workers on the leading axis.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from tests.oracles.common import Gradient


class Update(Protocol):
    """What every worker's own optimizer adds to its parameters, given them, its gradient and the step."""

    rates: Sequence[float | Tensor]

    def __call__(self, x: Tensor, g: Tensor, k: int) -> Tensor: ...


class AdamW:
    """AdamW, Algorithm 2 of Loshchilov and Hutter, with torch's defaults."""

    def __init__(self, rates: Sequence[float | Tensor], *, decay: float = 0.01) -> None:
        self.rates, self.decay = rates, decay
        self.forget()

    def forget(self) -> None:
        self.first, self.second, self.steps = torch.zeros(()), torch.zeros(()), 0

    def average(self) -> None:
        self.first = self.first.mean(0).expand_as(self.first)
        self.second = self.second.mean(0).expand_as(self.second)

    def __call__(self, x: Tensor, g: Tensor, k: int) -> Tensor:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        return -self.rates[k] * (self.decay * x + first / (second.sqrt() + 1e-8))


def mean_of(mean: Callable[[Tensor, int], Tensor], gradient: Gradient, x: Tensor, update: Update, steps: int) -> Tensor:
    """Every worker's own update, along whatever `mean` makes of all gradients; it is given them and the step."""
    for k in range(steps):
        x = x + update(x, mean(gradient(x, k), k).expand_as(x), k)
    return x


def weighted(
    gradient: Gradient, x: Tensor, update: Update, steps: int, *, period: int, samples: Sequence[Tensor]
) -> Tensor:
    """FedAvg: means weighted by what each worker has seen since the last; who sees nothing does nothing.

    Args:
        samples: for each step, every worker's number of samples.
    """
    seen = torch.zeros(len(x), dtype=x.dtype)
    for k in range(steps):
        x = x + (samples[k] > 0)[:, None] * update(x, gradient(x, k), k)
        seen = seen + samples[k]
        if (k + 1) % period == 0:
            x = ((seen / seen.sum()) @ x).expand_as(x)
            seen = torch.zeros_like(seen)
    return x


def desynced_adam(
    gradient: Gradient, x: Tensor, steps: int, *, rate: float, period: int, periods: Sequence[int]
) -> Tensor:
    """DES-LOC: Adam on every worker; parameters and both moments are averaged at periods of their own."""
    adam = AdamW([rate] * steps, decay=0.0)
    for k in range(1, steps + 1):
        x = x + adam(x, gradient(x, k - 1), k - 1)
        if k % period == 0:
            x = x.mean(0).expand_as(x)
        if k % periods[0] == 0:
            adam.first = adam.first.mean(0).expand_as(x)
        if k % periods[-1] == 0 and len(periods) > 1:
            adam.second = adam.second.mean(0).expand_as(x)
    return x
