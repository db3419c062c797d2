# SPDX-License-Identifier: Apache-2.0
"""Local steps and slow steps once more, straight from their papers: workers on the leading axis of one tensor.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Gradient = Callable[[Tensor, int], Tensor]
Mixing = Callable[[int], Tensor]


class Worker(Protocol):
    """Every worker's own optimizer: what it adds to the parameters, and what may be done to its memory."""

    rate: float

    def __call__(self, x: Tensor, g: Tensor) -> Tensor: ...

    def forget(self) -> None: ...

    def average(self) -> None: ...


class Momentum:
    """SGD with momentum."""

    def __init__(self, rate: float, momentum: float = 0.9) -> None:
        self.rate, self.momentum = rate, momentum
        self.forget()

    def forget(self) -> None:
        self.velocity = torch.zeros(())

    def average(self) -> None:
        self.velocity = self.velocity.mean(0).expand_as(self.velocity)

    def __call__(self, x: Tensor, g: Tensor) -> Tensor:
        self.velocity = self.momentum * self.velocity + g
        return -self.rate * self.velocity


class Adam:
    """AdamW, Algorithm 2 of Loshchilov and Hutter, with torch's defaults."""

    def __init__(self, rate: float, decay: float = 0.01) -> None:
        self.rate, self.decay = rate, decay
        self.forget()

    def forget(self) -> None:
        self.first, self.second, self.steps = torch.zeros(()), torch.zeros(()), 0

    def average(self) -> None:
        self.first = self.first.mean(0).expand_as(self.first)
        self.second = self.second.mean(0).expand_as(self.second)

    def __call__(self, x: Tensor, g: Tensor) -> Tensor:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * g
        self.second = 0.999 * self.second + 0.001 * g**2
        first, second = self.first / (1 - 0.9**self.steps), self.second / (1 - 0.999**self.steps)
        return -self.rate * (self.decay * x + first / (second.sqrt() + 1e-8))


def slow_momentum(
    gradient: Gradient,
    x: Tensor,
    worker: Worker,
    steps: int,
    *,
    period: int,
    momentum: float,
    lr: float = 1.0,
    buffers: str = "maintain",
    exact: bool = True,
    mixing: Mixing | None = None,
) -> Tensor:
    """SlowMo, Algorithm 1, line by line, for doubly stochastic mixings; without line 6 where it is not exact."""
    slow = torch.zeros_like(x)
    for t in range(steps // period):
        if buffers == "reset":
            worker.forget()
        elif buffers == "average" and t:
            worker.average()
        begun = x
        for k in range(t * period, (t + 1) * period):
            x = x + worker(x, gradient(x, k))
            x = x if mixing is None else mixing(k) @ x
        reached = x.mean(0).expand_as(x) if exact else x
        slow = momentum * slow + (begun - reached) / worker.rate
        x = begun - lr * worker.rate * slow
    return x


def block_momentum(
    gradient: Gradient, x: Tensor, worker: Worker, steps: int, *, period: int, momentum: float, rate: float = 1.0
) -> tuple[Tensor, Tensor]:
    """BMUF with Nesterov's block momentum: blocks begin where momentum will carry the model; both of them."""
    model, begun, delta = x, x, torch.zeros_like(x)
    for k in range(steps):
        x = x + worker(x, gradient(x, k))
        if (k + 1) % period == 0:
            delta = momentum * delta + rate * (x.mean(0) - begun)
            model = model + delta
            x = begun = model + momentum * delta
    return x, model


def diloco(
    gradient: Gradient, x: Tensor, worker: Worker, steps: int, *, period: int, lr: float, momentum: float
) -> Tensor:
    """DiLoCo, Algorithm 1, with Nesterov momentum as its outer optimizer."""
    shared, buffer = x, torch.zeros_like(x)
    for k in range(steps):
        x = x + worker(x, gradient(x, k))
        if (k + 1) % period == 0:
            outer = (shared - x).mean(0).expand_as(x)
            buffer = momentum * buffer + outer
            shared = shared - lr * (outer + momentum * buffer)
            x = shared
    return x


def federated_adam(gradient: Gradient, x: Tensor, worker: Worker, steps: int, *, period: int, outer: Worker) -> Tensor:
    """Rounds whose mean change is the gradient of a server's optimizer (Reddi et al., 2021, Algorithm 1)."""
    shared = x
    for k in range(steps):
        x = x + worker(x, gradient(x, k))
        if (k + 1) % period == 0:
            shared = shared + outer(shared, (shared - x).mean(0).expand_as(x))
            x = shared
    return x


def in_nodes(
    gradient: Gradient,
    x: Tensor,
    worker: Worker,
    steps: int,
    *,
    period: int,
    node_size: int,
    global_period: int,
    warmup: int = 0,
    outer: Worker | None = None,
) -> Tensor:
    """Hierarchical Local SGD: nodes average now and then, everyone less often; then perhaps an outer step."""
    begun = x
    for k in range(steps):
        x = x + worker(x, gradient(x, k))
        if (k + 1) % global_period == 0 or k < warmup:
            x = x.mean(0).expand_as(x)
            x = begun = x if outer is None else begun + outer(begun, begun - x)
        elif (k + 1) % period == 0:
            x = x.view(-1, node_size, x.shape[-1]).mean(1).repeat_interleave(node_size, 0)
    return x


def weighted(
    gradient: Gradient, x: Tensor, worker: Worker, steps: int, *, period: int, samples: Sequence[Tensor]
) -> Tensor:
    """FedAvg: means weighted by what each worker has seen since the last; who sees nothing does nothing.

    Args:
        samples: for each step, every worker's number of samples.
    """
    seen = torch.zeros(len(x), dtype=x.dtype)
    for k in range(steps):
        x = x + (samples[k] > 0)[:, None] * worker(x, gradient(x, k))
        seen = seen + samples[k]
        if (k + 1) % period == 0:
            x = ((seen / seen.sum()) @ x).expand_as(x)
            seen = torch.zeros_like(seen)
    return x


def desynced_adam(
    gradient: Gradient,
    x: Tensor,
    steps: int,
    *,
    rate: float,
    period: int,
    periods: Sequence[int],
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> Tensor:
    """DES-LOC: Adam on every worker; parameters and both moments are averaged at periods of their own."""
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    for k in range(1, steps + 1):
        g = gradient(x, k - 1)
        first = betas[0] * first + (1 - betas[0]) * g
        second = betas[1] * second + (1 - betas[1]) * g * g
        x = x - rate * (first / (1 - betas[0] ** k)) / ((second / (1 - betas[1] ** k)).sqrt() + eps)
        if k % period == 0:
            x = x.mean(0).expand_as(x)
        if periods and k % periods[0] == 0:
            first = first.mean(0).expand_as(first)
        if len(periods) > 1 and k % periods[1] == 0:
            second = second.mean(0).expand_as(second)
    return x
