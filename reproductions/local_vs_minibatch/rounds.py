# SPDX-License-Identifier: Apache-2.0
"""Minibatch, local, inner/outer and accelerated SGD, many runs at once: all machines, step sizes and seeds in tensors.

Shapes: S seeds, C candidates (step sizes), M machines, K steps a round, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from reproductions.local_vs_minibatch.even_odd import EvenOdd


def rounds_of(problem: EvenOdd, draws: Tensor, period: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Round after round what the machines see: features [S, K, M, D] and labels [S, K, M].

    Args:
        problem: whose pictures.
        draws: their numbers, [S, steps, M].
        period: K, steps in a round.
    """
    for rows in draws.split(period, dim=1):
        yield problem.features[rows], problem.even[rows]


def inner_outer(rounds: Iterable[tuple[Tensor, Tensor]], rates: Tensor, inner: Tensor, keep: set[int]) -> list[Tensor]:
    """Where each run is after the rounds in `keep`: [S, C, D] each.

    Args:
        rounds: as `rounds_of` gives them.
        rates: the outer step along each gradient, [C].
        inner: the inner step over the outer one, [C].
        keep: rounds, counted from 1.
    """
    kept: list[Tensor] = []
    x: Tensor | None = None
    for count, (features, labels) in enumerate(rounds, 1):
        seeds, _, machines, width = features.shape
        x = features.new_zeros(seeds, len(rates), width) if x is None else x
        own = x[:, None].repeat(1, machines, 1, 1)  # [S, M, C, D]
        total = torch.zeros_like(x)
        for seen, even in zip(features.unbind(1), labels.unbind(1), strict=True):
            off = torch.sigmoid(own @ seen[..., None])[..., 0] - even[..., None]  # [S, M, C]
            total += torch.einsum("smc,smd->scd", off, seen)
            own.addcmul_((off * (rates * inner))[..., None], seen[:, :, None], value=-1)
        x = x - rates[:, None] * total / machines
        if count in keep:
            kept.append(x)
    return kept


def minibatch(rounds: Iterable[tuple[Tensor, Tensor]], rates: Tensor, keep: set[int]) -> list[Tensor]:
    """The same without inner steps, where a round is one product of matrices; `rates` along the mean gradient."""
    kept: list[Tensor] = []
    x: Tensor | None = None
    for count, (features, labels) in enumerate(rounds, 1):
        x = features.new_zeros(len(features), len(rates), features.shape[-1]) if x is None else x
        x = x - rates[:, None] * _mean_gradient(x, features, labels)
        if count in keep:
            kept.append(x)
    return kept


def accelerated(rounds: Iterable[tuple[Tensor, Tensor]], rates: Tensor, keep: set[int]) -> list[Tensor]:
    """AC-SA on the mean gradient of each round: the aggregates after the rounds in `keep`."""
    kept: list[Tensor] = []
    x = aggregate = torch.zeros(())
    for t, (features, labels) in enumerate(rounds, 1):
        if t == 1:
            x = aggregate = features.new_zeros(len(features), len(rates), features.shape[-1])
        a = 2 / (t + 1)
        gradient = _mean_gradient(aggregate.lerp(x, a), features, labels)
        x = x - t * rates[:, None] * gradient
        aggregate = aggregate.lerp(x, a)
        if t in keep:
            kept.append(aggregate)
    return kept


def _mean_gradient(x: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    """The mean over a round's machines and steps of the gradients at each candidate's point: [S, C, D]."""
    features, labels = features.flatten(1, 2), labels.flatten(1)
    off = torch.sigmoid(x @ features.mT) - labels[:, None]
    return off @ features / labels.shape[1]
