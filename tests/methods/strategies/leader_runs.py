# SPDX-License-Identifier: Apache-2.0
"""A loss with two basins, and the losses and starts of all workers, for tests of leaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.problems import Problem, Vector


@dataclass(frozen=True)
class DoubleWell:
    """(x^2 - 1)^2 / 4 + tilt x, element by element: two basins, the same for every worker."""

    tilt: float = 0.0
    width: int = 1

    @property
    def start(self) -> Tensor:
        return torch.zeros(self.width, dtype=torch.float64)

    def model(self) -> nn.Module:
        return Vector(self.start, [self.width])

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        x = model()
        return ((x.square() - 1).square() / 4 + self.tilt * x).sum()

    def gradient(self, x: Tensor, step: int) -> Tensor:
        return x * (x.square() - 1) + self.tilt


def starts_of(n: int, width: int = 34) -> Tensor:
    """Points at which workers begin, all different."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2


def losses_of(problem: Problem) -> Callable[[Tensor, int], Tensor]:
    """The loss of every worker at its own row of parameters."""

    def losses(x: Tensor, step: int) -> Tensor:
        model, found = problem.model(), []
        for rank, row in enumerate(x):
            nn.utils.vector_to_parameters(row.clone(), model.parameters())
            found.append(problem.loss(model, rank, step).detach())
        return torch.stack(found)

    return losses
