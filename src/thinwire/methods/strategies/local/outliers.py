# SPDX-License-Identifier: Apache-2.0
"""A guard of means against workers that have moved much further than usual."""

import logging
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.replica.replica import Replica

Outliers = Literal["keep", "clip", "down-weight", "leave-out"]
ROUNDS = 8
"""Rounds whose medians are kept."""
LIMIT = 4.0
"""Times the usual norm."""
_LOGGER = logging.getLogger("thinwire")


def guard(norms: Tensor, weights: Tensor, kept: Tensor, outliers: Outliers) -> tuple[Tensor, Tensor, Tensor]:
    """Find workers whose displacement is much longer than usual in this round and in the last ones.

    At least half of the workers are never outliers.

    Args:
        norms: of the workers' displacements.
        weights: of the workers; zero for one that does not contribute.
        kept: the workers' medians in the last rounds; zero where there was none.
        outliers: what to do.

    Returns:
        Each worker's factor in the sum of displacements, its norm as a multiple of the limit, and the kept medians with
        that of this round.

    Example:
        >>> norms, weights = torch.tensor([1.0, 2.0, 40.0]).double(), torch.ones(3).double()
        >>> factors, excess, kept = guard(norms, weights, torch.zeros(8).double(), "leave-out")
        >>> factors.tolist(), excess.tolist()
        ([0.5, 0.5, 0.0], [0.125, 0.25, 5.0])
    """
    contributes = weights > 0
    known = norms[contributes & norms.isfinite()]
    now = known.median() if known.numel() else norms.new_zeros(())
    kept = torch.cat([now.view(1), kept[:-1]])
    limit = LIMIT * torch.maximum(now, kept[kept > 0].median() if bool(kept.any()) else now)
    excess = torch.where(limit > 0, norms / limit, torch.where(norms > 0, torch.inf, 0.0))
    factors = 1 / excess.clamp(min=1)
    if outliers == "leave-out":
        factors = (factors >= 1).to(norms.dtype)
    factors = torch.where(norms.isfinite() & contributes, factors, 0.0) * weights
    total = weights.sum() if outliers == "clip" else factors.sum()
    return factors / total.clamp(min=torch.finfo(norms.dtype).tiny), excess, kept


def report_outliers(r: Replica, excess: Tensor) -> None:
    """Count the outliers in the metrics, and log on rank 0 which workers they are."""
    found = [rank for rank, each in enumerate(excess.tolist()) if not each <= 1]
    r.metrics["outliers"] = float(len(found))
    if found and r.comm.rank == 0:
        moved = ", ".join(f"rank {rank} ({LIMIT * excess[rank]:.3g} times as far)" for rank in found)
        _LOGGER.warning("step %d: workers have moved much further than usual in this round: %s", r.step, moved)
