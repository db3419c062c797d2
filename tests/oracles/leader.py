# SPDX-License-Identifier: Apache-2.0
"""Leaders and elastic averaging once more, straight from the papers: all workers in one tensor.

Nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles.common import Descent, Gradient

Losses = Callable[[Tensor, int], Tensor]


def starts_of(n: int, width: int = 34, seed: int = 0) -> Tensor:
    """Points at which workers begin, all different."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / 2


def best_of(scores: Tensor, among: Sequence[int]) -> int:
    """The lowest rank of those with the least score."""
    return min(among, key=lambda i: (float(scores[i]), i))


def lsgd(
    gradient: Gradient,
    losses: Losses,
    x: Tensor,
    descend: Descent,
    steps: int,
    *,
    period: int,
    pull: float,
    node_size: int = 0,
    global_period: int = 0,
    global_pull: float = 0.0,
    led: list[int] | None = None,
) -> Tensor:
    """LSGD with synchronous rounds; with nodes, the local pull and then the global one."""
    n = len(x)
    nodes = [range(first, first + node_size) for first in range(0, n, node_size)] if node_size else []
    seen: list[Tensor] = []
    for k in range(steps):
        seen.append(losses(x, k).float())
        x = x + descend(x, gradient(x, k), k)
        if (k + 1) % period:
            continue
        scores = torch.stack(seen[-period:]).mean(0)
        if nodes:
            x = x + pull * (torch.stack([x[best_of(scores, node)] for node in nodes for _ in node]) - x)
        if not nodes or (k + 1) % global_period == 0:
            leader = best_of(scores, range(n))
            x = x + (global_pull if nodes else pull) * (x[leader] - x)
            if led is not None:
                led.append(leader)
    return x


def lgd(gradient: Gradient, losses: Losses, x: Tensor, rate: float, steps: int, *, pull: float) -> Tensor:
    """Leader gradient descent: the gradient and the pull, both at the same parameters."""
    for k in range(steps):
        z = x[best_of(losses(x, k).float(), range(len(x)))]
        x = x - rate * (gradient(x, k) + pull * (x - z))
    return x


def easgd(
    gradient: Gradient, x: Tensor, descend: Descent, steps: int, *, period: int, pull: float, centre_pull: float
) -> tuple[Tensor, Tensor]:
    """EASGD: workers and their centre, both updates from the values before either."""
    centre = x.mean(0)
    for k in range(steps):
        g = gradient(x, k)
        step = descend(x, g, k)
        if k % period == 0:
            x, centre = x - pull * (x - centre), (1 - centre_pull) * centre + centre_pull * x.mean(0)
        x = x + step
    return x, centre


def eamsgd(
    gradient: Gradient,
    x: Tensor,
    rates: Sequence[float],
    *,
    period: int,
    pull: float,
    centre_pull: float,
    momentum: float,
) -> tuple[Tensor, Tensor]:
    """EAMSGD, Algorithm 2: gradients ahead of the workers, the spring at them; where they are, and the centre."""
    centre, velocity = x.mean(0), torch.zeros_like(x)
    for k, rate in enumerate(rates):
        g = gradient(x + momentum * velocity, k)
        if k % period == 0:
            x, centre = x - pull * (x - centre), (1 - centre_pull) * centre + centre_pull * x.mean(0)
        velocity = momentum * velocity - rate * g
        x = x + velocity
    return x, centre
