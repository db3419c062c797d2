# SPDX-License-Identifier: Apache-2.0
"""The decentralised momentum methods once more, straight from their equations: workers on the leading axis.

Real runs are compared to these, and to the methods' fixed points. Nothing in here imports thinwire. What each worker
subtracts, before momentum, is (gradient + decay * x) * rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles.common import Gradient, Mixing


def decentlam(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float | Tensor],
    *,
    mixing: Mixing,
    momentum: float,
    nesterov: bool = False,
    decay: float = 0.0,
) -> Tensor:
    """DecentLaM: heavy-ball momentum on the gradient g~ = (x - W(x - rate * g)) / rate."""
    m = torch.zeros_like(x)
    for k, rate in enumerate(rates):
        g = gradient(x, k) + decay * x
        whole = (x - mixing(k) @ (x - rate * g)) / rate
        m = momentum * m + whole
        x = x - rate * (whole + momentum * m if nesterov else m)
    return x


def quasi_global(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float | Tensor],
    *,
    mixing: Mixing,
    momentum: float,
    memory: float | None = None,
    nesterov: bool = False,
    decay: float = 0.0,
) -> Tensor:
    """QG-DmSGD: the momentum smooths (x - x_new) / rate, after mixing."""
    kept = momentum if memory is None else memory
    m = torch.zeros_like(x)
    for k, rate in enumerate(rates):
        g = gradient(x, k) + decay * x
        u = g + momentum * m
        u = g + momentum * u if nesterov else u
        new = mixing(k) @ (x - rate * u)
        m = kept * m + (1 - kept) * (x - new) / rate
        x = new
    return x


def double_averaging(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float | Tensor],
    *,
    mixing: Mixing,
    momentum: float,
    decay: float = 0.0,
) -> Tensor:
    """DA-DmSGD: parameters and momentum are both mixed."""
    m = torch.zeros_like(x)
    for k, rate in enumerate(rates):
        u = momentum * m + gradient(x, k) + decay * x
        x = mixing(k) @ (x - rate * u)
        m = mixing(k) @ u
    return x


def exact_diffusion(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float | Tensor],
    *,
    mixing: Mixing,
    momentum: float,
    decay: float = 0.0,
) -> Tensor:
    """EDM, with the last adapted parameters: x <- (I + W)/2 (p + x - p_before)."""
    m, before = torch.zeros_like(x), x
    for k, rate in enumerate(rates):
        m = momentum * m + (1 - momentum) * (gradient(x, k) + decay * x)
        adapted = x - rate * m
        corrected = adapted + x - before
        x, before = (corrected + mixing(k) @ corrected) / 2, adapted
    return x


def directed_exponential(n: int, dtype: torch.dtype) -> Mixing:
    """All ranks 1, 2, 4, ... places ahead, at every step."""
    hops = [2**i for i in range(n) if 2**i < n]
    total = sum((torch.eye(n, dtype=dtype).roll(hop, 0) for hop in hops), torch.eye(n, dtype=dtype))
    return lambda k: total / (len(hops) + 1)


def alone(n: int, dtype: torch.dtype) -> Mixing:
    """No worker sends anything."""
    return lambda k: torch.eye(n, dtype=dtype)


def noloco(
    gradient: Gradient,
    x: Tensor,
    descend: Callable[[Tensor, Tensor, int], Tensor],
    steps: int,
    *,
    mixing: Mixing,
    period: int,
    lr: float,
    momentum: float,
    pull: float,
) -> Tensor:
    """NoLoCo: a momentum of what a pair has come on average, and of the way between the points where they began."""
    point, delta = x, torch.zeros_like(x)
    for k in range(steps):
        x = x + descend(x, gradient(x, k), k)
        if (k + 1) % period == 0:
            share = mixing((k + 1) // period - 1)
            delta = momentum * delta + lr * (share @ (x - point)) - pull * (point - share @ point)
            point = x = point + delta
    return x
