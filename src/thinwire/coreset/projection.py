# SPDX-License-Identifier: Apache-2.0
"""Points projected onto the two directions in which they vary most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.coreset.similarity import Features, centred, checked

_MOST = 4000
_WIDEST = 2048


@dataclass(frozen=True)
class Projection:
    """The two principal components of some points.

    Args:
        others: float32, [m, 2]; at most 4,000 random points.
        chosen: float32, [k, 2]; the chosen points, in their order.
        share: of the variance in the two directions.
    """

    others: Tensor
    chosen: Tensor
    share: float


def projected(features: Features, indices: Tensor, *, seed: int = 0) -> Projection:
    """Project onto the first two principal components.

    Args:
        features: [n, d]; of more than 2,048 columns, evenly spaced ones are used.
        indices: int64, [k]; the chosen points.
        seed: of the other points' draw.
    """
    rows = centred(checked(features)).cpu()
    rows = rows[:, :: -(-rows.shape[1] // _WIDEST)]
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed), device="cpu")[:_MOST]
    spread = torch.cov(rows[drawn].double().T, correction=0).reshape(rows.shape[1], -1)
    values, vectors = torch.linalg.eigh(spread)
    two = vectors[:, -2:].flip(1).float()
    two = torch.cat([two, torch.zeros(len(two), 2 - two.shape[1], dtype=torch.float32, device="cpu")], dim=1)
    share = float(values[-2:].sum() / values.sum().clamp_min(1e-300))
    return Projection(rows[drawn] @ two, rows[indices] @ two, min(1.0, share))
