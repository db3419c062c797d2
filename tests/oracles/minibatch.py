# SPDX-License-Identifier: Apache-2.0
"""Minibatch and accelerated SGD once more, straight from the papers: workers on the leading axis.

The plain second opinion that real runs are compared to; nothing in here knows thinwire.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tests.oracles.common import Gradient


def minibatch(gradient: Gradient, x: Tensor, rates: Sequence[float], *, period: int) -> Tensor:
    """All gradients of a round are taken where it begins, and one step is made along their mean, times their number."""
    steps = len(rates)
    for first in range(0, steps - steps % period, period):
        total = sum(rates[k] * gradient(x, k).mean(0) for k in range(first, first + period))
        x = x - total
    return x


def accelerated(
    gradient: Gradient, x: Tensor, rate: float, rounds: int, *, period: int = 1, stage: float = float("inf")
) -> tuple[Tensor, Tensor]:
    """AC-SA on the mean gradient of each round, with new stages from the aggregate; where it trains, and its result.

    Written with gamma_t = 2 / (rate t (t+1)) as in Ghadimi and Lan: the prox step moves by a_t / gamma_t = rate t.
    """
    iterate = aggregate = x
    t = 0
    for r in range(rounds):
        t += 1
        a = 2 / (t + 1)
        gamma = 2 / (rate * t * (t + 1))
        middle = (1 - a) * aggregate + a * iterate
        g = sum(gradient(middle, k).mean(0) for k in range(r * period, (r + 1) * period)) / period
        iterate = iterate - a / gamma * g
        aggregate = (1 - a) * aggregate + a * iterate
        if t >= stage:
            iterate, t = aggregate, 0
    a = 2 / (t + 2)
    return (1 - a) * aggregate + a * iterate, aggregate
