# SPDX-License-Identifier: Apache-2.0
"""Real runs for tests of local and slow steps: any optimizer, on threads or on a rank of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import thinwire
from tests.problems import Problem, flat
from thinwire import Comm, Strategy, Worker

Make = Callable[[nn.Module], Optimizer]


def sgd(lr: float = 0.1, momentum: float = 0.9, **settings: Any) -> Make:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, **settings)


def adamw(lr: float = 0.01) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


def begin(comm: Comm | None, strategy: Strategy, problem: Problem, make: Make) -> Worker:
    model = problem.model()
    return thinwire.attach(model, make(model), strategy, comm=comm)


def go_on(
    worker: Worker, problem: Problem, steps: range, before_step: Callable[[Worker, int], None] | None = None
) -> Worker:
    """The loop of any user, over some steps."""
    for step in steps:
        worker.optimizer.zero_grad()
        problem.loss(worker.model, worker.comm.rank, step).backward()
        if before_step is not None:
            before_step(worker, step)
        worker.optimizer.step()
    return worker


def run(comm: Comm | None, strategy: Strategy, problem: Problem, steps: int, make: Make, **settings: Any) -> Worker:
    worker = go_on(begin(comm, strategy, problem, make), problem, range(steps), **settings)
    worker.detach()
    return worker


def ended(n: int, strategy: Strategy, problem: Problem, steps: int, make: Make, **settings: Any) -> Tensor:
    """The parameters of n threads after training, stacked."""
    return torch.stack(
        thinwire.run_threads(n, lambda comm: flat(run(comm, strategy, problem, steps, make, **settings).model))
    )


def sent(n: int, strategy: Strategy, problem: Problem, steps: int, make: Make) -> list[tuple[float, int]]:
    """Payload bytes and messages of each rank while it trains."""

    def body(comm: Comm) -> tuple[float, int]:
        worker = begin(comm, strategy, problem, make)
        before = comm.meter.payload_bytes, comm.meter.messages
        go_on(worker, problem, range(steps))
        return comm.meter.payload_bytes - before[0], comm.meter.messages - before[1]

    return thinwire.run_threads(n, body)
