# SPDX-License-Identifier: Apache-2.0
"""Rounds in which workers take different numbers of steps: all in one tensor, the worker on the leading axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.oracles.common import Gradient


def unequal_rounds(
    gradient: Gradient,
    x: Tensor,
    *,
    rate: float,
    period: int,
    steps: Sequence[int],
    rounds: int,
    samples: Sequence[float],
    momentum: float | None = None,
) -> Tensor:
    """Worker i takes steps[i] steps, the first of each round's `period`; then the mean by samples, or slow momentum.

    Args:
        gradient: of all workers at a step, of which each uses its own row.
        x: a row for each worker, all equal.
        rate: the learning rate.
        period: steps of the group in a round.
        steps: of each worker in a round.
        rounds: how many.
        samples: of each worker's steps.
        momentum: of the slow steps; None takes the mean itself.
    """
    weights = torch.tensor([s * n for s, n in zip(samples, steps, strict=True)], dtype=x.dtype)
    weights = weights / weights.sum()
    slow = torch.zeros_like(x[0])
    for number in range(rounds):
        start = x[0].clone()
        for k in range(period):
            g = gradient(x, number * period + k)
            takes = torch.tensor([k < n for n in steps], dtype=x.dtype)
            x = x - rate * takes[:, None] * g
        mean = (weights[:, None] * x).sum(0)
        if momentum is not None:
            slow = momentum * slow + (start - mean) / rate
            mean = start - rate * slow
        x = mean.expand_as(x)
    return x


def rounds_among(
    gradient: Callable[[Tensor, int, int], Tensor],
    x: Tensor,
    *,
    rate: float,
    period: int,
    rounds: Sequence[Sequence[tuple[int, int]]],
) -> Tensor:
    """Rounds among changing workers, which take given numbers of steps; the mean by these numbers.

    Args:
        gradient: of a worker at a point and a step.
        x: the common start.
        rate: the learning rate.
        period: steps of the group in a round.
        rounds: the workers of each round, with their numbers of steps.
    """
    for number, workers in enumerate(rounds):
        total = torch.zeros_like(x)
        for worker, count in workers:
            own = x.clone()
            for k in range(count):
                own -= rate * gradient(own, worker, number * period + k)
            total += count * own
        x = total / sum(count for _, count in workers)
    return x
