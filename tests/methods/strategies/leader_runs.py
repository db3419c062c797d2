# SPDX-License-Identifier: Apache-2.0
"""A training loop that reports its losses, for tests of leaders; and a loss with two basins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import thinwire
from tests.problems import Problem, Vector, flat
from thinwire import Comm, Strategy, Worker
from thinwire.core.comm.group import comm_for

Reported = Callable[[int, int, Tensor], Tensor | float | None]
"""From rank, step and loss to the loss that is reported."""


def true_loss(rank: int, step: int, loss: Tensor) -> Tensor:
    return loss


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


def begin(
    comm: Comm | None, strategy: Strategy, problem: Problem, starts: Tensor | None = None, **settings: Any
) -> Worker:
    """Attach a problem's model; each rank begins at its own row of `starts`, where there are any."""
    model, comm = problem.model(), comm or comm_for()
    init: Literal["broadcast", "own"] = "broadcast"
    if starts is not None:
        init = "own"
        nn.utils.vector_to_parameters(starts[comm.rank].clone(), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 1.0, **settings})
    return thinwire.attach(model, optimizer, strategy, comm=comm, init=init, bucket_bytes=40)


def go_on(
    worker: Worker, problem: Problem, rates: Sequence[float], first: int = 0, reported: Reported = true_loss
) -> Worker:
    """Some steps of a training loop, each of which reports its loss."""
    for step, rate in enumerate(rates, first):
        worker.optimizer.param_groups[0]["lr"] = rate
        worker.optimizer.zero_grad()
        loss = problem.loss(worker.model, worker.comm.rank, step)
        loss.backward()
        worker.record_batch(loss=reported(worker.comm.rank, step, loss.detach()))
        worker.optimizer.step()
    return worker


def train(
    comm: Comm | None,
    strategy: Strategy,
    problem: Problem,
    rates: Sequence[float],
    *,
    starts: Tensor | None = None,
    reported: Reported = true_loss,
    **settings: Any,
) -> Worker:
    """One rank's whole run."""
    worker = go_on(begin(comm, strategy, problem, starts, **settings), problem, rates, reported=reported)
    worker.detach()
    return worker


def together(n: int, strategy: Strategy, problem: Problem, rates: Sequence[float], **settings: Any) -> Tensor:
    """The parameters of n threads after training, stacked."""
    return torch.stack(
        thinwire.run_threads(n, lambda c: flat(train(c, strategy, problem, rates, **settings).model), timeout=20)
    )
