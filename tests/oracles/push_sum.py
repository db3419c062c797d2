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
