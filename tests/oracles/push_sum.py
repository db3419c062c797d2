# SPDX-License-Identifier: Apache-2.0
"""Overlap SGP once more, straight from its paper: workers on the leading axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.oracles.common import Descent, Gradient, Mixing


def overlap_push_sum(
    gradient: Gradient,
    x: Tensor,
    descend: Descent,
    steps: int,
    *,
    mixing: Mixing,
    staleness: int,
    biased: bool = False,
    averaged: Sequence[int] = (),
) -> Tensor:
    """Overlap SGP, Algorithm 2: what is sent in step k arrives at the end of step k + staleness; returns z.

    Args:
        gradient: all workers' at their rows of the parameters.
        x: a row for each worker.
        descend: their SGD.
        steps: how many.
        mixing: column-stochastic; a column is how one worker splits its vector.
        staleness: steps that messages are in flight.
        biased: the weights are left out.
        averaged: after these steps everything is averaged, messages in flight included.
    """
    w, z, sent = torch.ones(len(x), 1, dtype=x.dtype), x, list[tuple[Tensor, Tensor]]()
    for k in range(steps):
        x = x + descend(z, gradient(z, k), k)
        share = mixing(k)
        kept = share.diagonal()[:, None]
        away = share - torch.diag(share.diagonal())
        sent.append((away @ x, away @ w))
        x, w = kept * x, kept * w
        if len(sent) > staleness:
            x, w = (mine + theirs for mine, theirs in zip((x, w), sent.pop(0), strict=True))
        if k + 1 in averaged:
            x = (x.sum(0) + sum(away_x.sum(0) for away_x, _ in sent)).expand_as(x) / len(x)
            w, sent = torch.ones_like(w), []
        z = x if biased else x / w
    return z


def seldom_overlap_push_sum(
    gradient: Gradient, x: Tensor, descend: Descent, steps: int, *, mixing: Mixing, tau: int
) -> Tensor:
    """Overlap SGP, Algorithm 2 as in the paper's box: sends at every tau-th step, and adds that tau steps later.

    Returns z. Steps count from 1, so that a period ends with what it sends.
    """
    w, z, arrives = torch.ones(len(x), 1, dtype=x.dtype), x, dict[int, tuple[Tensor, Tensor]]()
    for k in range(1, steps + 1):
        x = x + descend(z, gradient(z, k - 1), k - 1)
        if k % tau == 0:
            share = mixing(k // tau - 1)
            kept = torch.diag(share.diagonal())
            arrives[k + tau] = ((share - kept) @ x, (share - kept) @ w)
            x, w = kept @ x, kept @ w
        if k in arrives:
            others_x, others_w = arrives.pop(k)
            x, w = x + others_x, w + others_w
        z = x / w
    return z
