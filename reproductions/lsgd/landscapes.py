# SPDX-License-Identifier: Apache-2.0
"""Landscapes with several basins, without noise: where leaders and springs take workers that begin apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire import Comm, Strategy, Worker, attach, run_threads

EVERY = 10
Loss = Callable[[Tensor], Tensor]


class Point(nn.Module):
    """One vector, as a model."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.at = nn.Parameter(start.clone())


@dataclass(frozen=True)
class Descent:
    """How workers went down.

    Attributes:
        places: of each worker after each step, [steps + 1, workers, width].
        shipped: the loss of what would have been shipped, every `EVERY` steps from the first on.
    """

    places: Tensor
    shipped: Tensor


def double_well(x: Tensor) -> Tensor:
    """(x^2 - 1)^2 / 4, summed: minima at -1 and 1, a hill of 1/4 between them."""
    return (x.square() - 1).square().sum() / 4


@dataclass(frozen=True)
class Completion:
    """Find a matrix of low rank from some of its entries, as a product of two thin ones.

    Turning both factors changes nothing, so that minima come in families, and their means are none.

    Args:
        side: rows, and columns.
        rank: columns of a factor.
        shown: the share of entries that is known.
        seed: of the matrix and of which entries are known.
    """

    side: int = 16
    rank: int = 2
    shown: float = 0.7
    seed: int = 0

    def starts(self, workers: int) -> Tensor:
        """Small factors, different for every worker: [workers, width]."""
        draw = torch.Generator().manual_seed(1000 + self.seed)
        return 0.5 * torch.randn(workers, 2 * self.side * self.rank, generator=draw, dtype=torch.float64)

    def loss(self) -> Loss:
        """Half the mean square of what is wrong with the known entries."""
        draw = torch.Generator().manual_seed(self.seed)
        left, right = torch.randn(2, self.side, self.rank, generator=draw, dtype=torch.float64)
        known = (torch.rand(self.side, self.side, generator=draw) < self.shown).double()
        matrix = left @ right.T

        def loss(x: Tensor) -> Tensor:
            first, second = x.view(2, self.side, self.rank)
            return (known * (first @ second.T - matrix)).square().sum() / known.sum() / 2

        return loss


def go_down(loss: Loss, strategy: Strategy, starts: Tensor, *, lr: float, steps: int) -> Descent:
    """Let threads descend by exact gradients, one from each row of `starts`."""

    def body(comm: Comm) -> tuple[list[Tensor], list[float]]:
        model = Point(starts[comm.rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        worker = attach(model, optimizer, strategy, comm=comm, init="own")
        places, shipped = [model.at.detach().clone()], [_shipped(worker, model, loss)]
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            here = loss(model.at)
            here.backward()
            worker.record_batch(loss=here)
            optimizer.step()
            places.append(model.at.detach().clone())
            if step % EVERY == 0:
                shipped.append(_shipped(worker, model, loss))
        worker.detach()
        return places, shipped

    rows = run_threads(len(starts), body)
    places = torch.stack([torch.stack(places) for places, _ in rows], dim=1)
    return Descent(places, torch.tensor(rows[0][1], dtype=torch.float64))


def _shipped(worker: Worker, point: Point, loss: Loss) -> float:
    with worker.consensus(), torch.no_grad():
        return float(loss(point.at))
