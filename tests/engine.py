# SPDX-License-Identifier: Apache-2.0
"""Small models, their data and a user's loop, for tests of the worker.

Threads share torch's global random generator, so everything here draws from generators of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import thinwire
from tests.problems import flat
from thinwire import Comm, Strategy, Worker

Model = TypeVar("Model", bound=nn.Module)
Batch = tuple[Tensor, Tensor]

__all__ = ["Batch", "Mixed", "attach", "batch", "batches", "drawn", "flat", "momentum", "net", "steps", "threads"]


def drawn(model: Model, seed: int = 0) -> Model:
    """The model, with its parameters drawn from a seed."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) / 2)
    return model


def net(seed: int = 0) -> nn.Sequential:
    """3 inputs, 5 hidden units, 2 outputs: sizes that are no multiples of vector registers."""
    return drawn(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), seed)


class Mixed(nn.Module):
    """Two dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 5), nn.Linear(5, 4).double(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)).double())).float())


def batch(rank: int, step: int, *, rows: int = 4, width: int = 3, classes: int = 2) -> Batch:
    """One rank's data for one step."""
    draw = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(rows, width, generator=draw), torch.randn(rows, classes, generator=draw)


def batches(rank: int, count: int, first: int = 0) -> list[Batch]:
    return [batch(rank, step) for step in range(first, first + count)]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def attach(
    comm: Comm | None,
    strategy: Strategy,
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = momentum,
    **settings: Any,
) -> Worker:
    """A small model under a strategy, in buckets of a few parameters."""
    model = net() if model is None else model
    return thinwire.attach(model, optimizer(model), strategy, comm=comm, **{"bucket_bytes": 48, **settings})


def steps(worker: Worker, data: Iterable[Batch]) -> Worker:
    """A user's training loop."""
    for x, y in data:
        worker.optimizer.zero_grad()
        (worker.model(x) - y).square().mean().backward()
        worker.optimizer.step()
    return worker


def threads(size: int, strategy: Strategy, count: int = 6, **settings: Any) -> list[Tensor]:
    """The parameters of `size` threads after some steps."""

    def work(comm: Comm) -> Tensor:
        worker = steps(attach(comm, strategy, **settings), batches(comm.rank, count))
        worker.detach()
        return flat(worker.model)

    return thinwire.run_threads(size, work, timeout=20)
