# SPDX-License-Identifier: Apache-2.0
"""Facility location straight from its definition: all distances in one matrix, one pick at a time."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]


def apart(x: Tensor) -> Matrix:
    """All distances, [n, n]."""
    rows = x.double().numpy()
    return np.sqrt(((rows[:, None] - rows[None]) ** 2).sum(2))


def greedy(distances: Matrix, budget: int) -> tuple[list[int], list[int], float]:
    """(picks, sizes of their clusters, cost): each pick lowers the cost most, the smallest number of equals."""
    n = len(distances)
    near = np.full(n, 4 * distances.max() + 1)
    picks: list[int] = []
    while len(picks) < budget:
        gains = np.maximum(0, near[:, None] - distances).sum(0)
        gains[picks] = -1
        picks.append(int(np.flatnonzero(gains >= gains.max() - 1e-9)[0]))
        near = np.minimum(near, distances[:, picks[-1]])
    return picks, clusters(distances, picks), cost(distances, picks)


def clusters(distances: Matrix, picks: list[int]) -> list[int]:
    """How many points each pick is nearest to; the earlier one of two as near, and a pick is always its own."""
    owner = distances[:, picks].argmin(1)
    owner[picks] = np.arange(len(picks))
    return np.bincount(owner, minlength=len(picks)).tolist()


def cost(distances: Matrix, picks: list[int]) -> float:
    return float(distances[:, picks].min(1).sum())


def best_cost(distances: Matrix, budget: int) -> float:
    """The least cost of all subsets of this size."""
    return min(cost(distances, list(subset)) for subset in combinations(range(len(distances)), budget))


def points(n: int, d: int = 5, seed: int = 0) -> Tensor:
    """Random points, clustered a little."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(4, d, generator=draw)
    return centres[torch.randint(4, (n,), generator=draw)] + torch.randn(n, d, generator=draw)


def blobs(sizes: list[int], d: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tight clusters far from each other, in random order, and which of them each point is of."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    kinds = kinds[torch.randperm(len(kinds), generator=draw)]
    centres = 100 * torch.eye(max(len(sizes), d))[: len(sizes), :d]
    return centres[kinds] + 0.01 * torch.randn(len(kinds), d, generator=draw), kinds
