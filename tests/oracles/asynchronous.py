# SPDX-License-Identifier: Apache-2.0
"""The asynchronous methods once more, straight from their papers: workers are rows, events happen one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Gradient = Callable[[int, Tensor, int], Tensor]
"""One worker's gradient: of (rank, its parameters, its step)."""


def pair_averages(
    gradient: Gradient, x: Tensor, rate: float, order: Sequence[int], partner: Callable[[int, int], int]
) -> Tensor:
    """AD-PSGD in its delta form, where messages take no time: event by event, each a matrix on all rows.

    Odd ranks are active: they send a request after each step, and see the average in their row when the next step ends.
    Even ranks are passive: they read their row for the next gradient as a step ends. A request to a passive rank that
    has not ended a step yet is answered when it has, with the row that was sent. Returns all rows.

    Args:
        gradient: of one worker.
        x: a row for each worker.
        rate: the learning rate.
        order: ranks as they end their steps.
        partner: the rank that a rank sends its request to, of (rank, its step).
    """
    size = len(x)
    x, read = x.clone(), x.clone()
    steps, waiting = [0] * size, dict[int, list[tuple[int, Tensor]]]()

    def average(i: int, j: int, sent: Tensor) -> None:
        to_and_from = torch.zeros(size, 1, dtype=x.dtype)
        to_and_from[i], to_and_from[j] = 0.5, -0.5
        x.add_(to_and_from @ (x[j] - sent)[None])

    for i in order:
        x[i] -= rate * gradient(i, read[i], steps[i])
        read[i] = x[i]
        steps[i] += 1
        for requester, sent in waiting.pop(i, []):
            average(requester, i, sent)
        if i % 2 == 0 or any(i == requester for queue in waiting.values() for requester, _ in queue):
            continue
        j = partner(i, steps[i] - 1)
        if steps[j]:
            average(i, j, x[i].clone())
        else:
            waiting.setdefault(j, []).append((i, x[i].clone()))
    return x


def eager_push_sum(
    gradient: Callable[[Tensor, int], Tensor],
    x: Tensor,
    rate: float,
    steps: int,
    *,
    mixing: Callable[[int], Tensor],
    staleness: int,
    delay: Callable[[int, int, int], int],
) -> tuple[Tensor, Tensor, list[int]]:
    """Overlap SGP, Algorithm 2 with the wait rule per edge: add what has arrived, wait for what is too old.

    Args:
        gradient: all workers' at their rows.
        x: a row for each worker.
        rate: the learning rate.
        steps: how many.
        mixing: column-stochastic; a column is how one worker splits its vector.
        staleness: steps that a message may be late.
        delay: steps by which it is late, of (from, to, step).

    Returns:
        The de-biased rows after each step, the weights after each step, and how many messages were waited for in each.
    """
    size = len(x)
    w, z = torch.ones(size, 1, dtype=x.dtype), x.clone()
    x, messages = x.clone(), list[tuple[int, int, int, Tensor, Tensor]]()
    seen_z, seen_w, waits = list[Tensor](), list[Tensor](), list[int]()
    for k in range(steps):
        x = x - rate * gradient(z, k)
        share = mixing(k)
        for i in range(size):
            for j in (j for j in range(size) if j != i and share[j, i] > 0):
                messages.append((k, i, j, share[j, i] * x[i], share[j, i] * w[i]))
        x, w = share.diagonal()[:, None] * x, share.diagonal()[:, None] * w
        arrived = [s + delay(i, j, s) <= k for s, i, j, _, _ in messages]
        due = [s + staleness <= k for s, *_ in messages]
        for here, must, (_, _, j, dx, dw) in zip(arrived, due, messages, strict=True):
            if here or must:
                x[j] += dx
                w[j] += dw
        waits.append(sum(must and not here for here, must in zip(arrived, due, strict=True)))
        messages = [each for each, here, must in zip(messages, arrived, due, strict=True) if not (here or must)]
        z = x / w
        seen_z.append(z)
        seen_w.append(w)
    return torch.stack(seen_z), torch.stack(seen_w), waits
