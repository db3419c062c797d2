# SPDX-License-Identifier: Apache-2.0
"""A task trained by threads of one process: no sockets, no clock, the same figures every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TypeVar

import torch
from torch import nn

from thinwire.core.comm.base import Comm
from thinwire.core.comm.threads import run_threads
from thinwire.errors import NonFiniteError
from thinwire.lab.tasks import Evaluation, Task
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach

Found = TypeVar("Found")


@dataclass(frozen=True)
class Schedule:
    """How long to train, and how fast.

    Args:
        steps: optimizer steps.
        batch_size: examples a step and worker.
        lr: the learning rate after warming up, which takes a tenth of the steps.
        momentum: of the workers' own SGD.
        weight_decay: of the workers' own SGD.
    """

    steps: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 1e-4

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(1, self.steps // 10))


def unless_diverged(run: Callable[[], Found], worst: Found) -> Found:
    """What a run gives; the worst there is, where its loss or its gradients are NaN or infinite.

    A trial whose learning rate is too high must not end the trials of the others.

    Example:
        >>> unless_diverged(lambda: 0.25, inf)
        0.25
    """
    try:
        return run()
    except NonFiniteError:
        return worst


def train_on_threads(
    task: Task, strategy: Strategy, schedule: Schedule, *, workers: int, split: str, seed: int
) -> Evaluation:
    """Train and measure the consensus on held-out data.

    Args:
        task: what is learned, with the model of its default size.
        strategy: how workers communicate.
        schedule: how long and how fast.
        workers: how many threads.
        split: how the training data are divided among workers, such as "dirichlet(0.1)".
        seed: of the division of data, the initial parameters, the order of the data and the strategy's draws.
    """

    def descent(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), schedule.lr, schedule.momentum, weight_decay=schedule.weight_decay)

    data = Data(workers, split, seed, schedule.steps, schedule.batch_size)
    return trained(task, strategy, data, optimizer=descent, rate=schedule.rate)


@dataclass(frozen=True)
class Data:
    """What workers train on.

    Args:
        workers: how many threads.
        split: how the training data are divided among them.
        seed: of everything that is drawn.
        steps: of each worker.
        batch_size: of a worker and step.
        eval_limit: held-out examples at the end; all of them unless given.
    """

    workers: int
    split: str
    seed: int
    steps: int
    batch_size: int
    eval_limit: int | None = None


def trained(
    task: Task,
    strategy: Strategy,
    data: Data,
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rate: Callable[[int], float],
    size: str | None = None,
) -> Evaluation:
    """As `train_on_threads`, with any optimizer, learning rate by step and size of the model.

    Returns:
        Of a run that diverges, an infinite loss, and a metric of 0.
    """
    shards, seed = task.shards(data.workers, split=data.split, seed=data.seed), data.seed

    def body(comm: Comm) -> Evaluation:
        model = task.model(size, seed=seed)
        moves = optimizer(model)
        worker = attach(model, moves, strategy, comm=comm, seed=seed)
        for step in range(data.steps):
            for group in moves.param_groups:
                group["lr"] = rate(step)
            batch = task.batch(shards[comm.rank], step, batch_size=data.batch_size, seed=seed, rank=comm.rank)
            moves.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            worker.record_batch(loss=loss)
            moves.step()
        with worker.consensus() as agreed:
            found = task.evaluate(agreed, limit=data.eval_limit)
        worker.detach()
        return found

    return unless_diverged(lambda: run_threads(data.workers, body)[0], Evaluation(inf, 0.0, 0))
