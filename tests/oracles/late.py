# SPDX-License-Identifier: Apache-2.0
"""Rounds that late work joins, replayed from the order of arrivals: one loop over all workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Arrival = tuple[int, int, float]
"""The worker, the round in which it started, and its tokens."""


def replay(
    displacement: Callable[[int, int, Tensor], Tensor],
    start: Tensor,
    rounds: Sequence[Sequence[Arrival]],
    *,
    rate: float,
    exponent: float | None,
    code: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Each round takes what has arrived; the point moves by `rate` along the weighted mean.

    Args:
        displacement: of a worker that starts in a round at a point.
        start: the first point.
        rounds: what arrives in each.
        rate: of the outer step.
        exponent: of one plus the age, in the discount; None drops late work.
        code: of messages, whose errors each worker adds to its next one.
    """
    points, errors = [start], dict[int, Tensor]()
    for number, arrivals in enumerate(rounds):
        total, weight = torch.zeros_like(start), 0.0
        for worker, started, tokens in sorted(arrivals, key=lambda each: (each[1], each[0])):
            message = displacement(worker, started, points[started]) + errors.get(worker, torch.zeros_like(start))
            if code is not None:
                sent = code(message)
                errors[worker], message = message - sent, sent
            age = number - started
            share = tokens * (0.0 if age and exponent is None else (1 + age) ** -(exponent or 0.0))
            total, weight = total + share * message, weight + share
        points.append(points[-1] + rate * total / weight if weight else points[-1])
    return points[-1]
