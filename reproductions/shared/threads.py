# SPDX-License-Identifier: Apache-2.0
"""A task trained by threads of one process: no sockets, no clock, the same figures every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TypeVar

import torch
from torch import nn

from thinwire import Comm, NonFiniteError, Strategy, Worker, attach, run_threads
from thinwire.lab.tasks import Batch, Evaluation, Task

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

    def descent(self, model: nn.Module) -> torch.optim.Optimizer:
        """The workers' own SGD."""
        return torch.optim.SGD(model.parameters(), self.lr, self.momentum, weight_decay=self.weight_decay)


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
    data = Data(workers, split, seed, schedule.steps, schedule.batch_size)
    return trained(task, strategy, data, optimizer=schedule.descent, rate=schedule.rate)


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

    def measure(done: Trained) -> Evaluation:
        with done.worker.consensus() as agreed:
            found = task.evaluate(agreed, limit=data.eval_limit)
        done.worker.detach()
        return found

    run = partial(on_threads, task, strategy, data, measure, optimizer=optimizer, rate=rate, size=size)
    return unless_diverged(lambda: run()[0], Evaluation(inf, 0.0, 0))


@dataclass(frozen=True)
class Trained:
    """One worker after its training.

    Args:
        comm: of its thread.
        model: its own copy.
        worker: as `attach` has made it.
        sent: payload bytes of the training.
        batch: its batch of a step and size.
    """

    comm: Comm
    model: nn.Module
    worker: Worker
    sent: float
    batch: Callable[[int, int], Batch]


def on_threads(
    task: Task,
    strategy: Strategy,
    data: Data,
    measure: Callable[[Trained], Found],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    rate: Callable[[int], float],
    size: str | None = None,
    record: bool = True,
    timeout: float = 60.0,
) -> list[Found]:
    """Train on threads, and return what `measure` says of each worker.

    Args:
        task: what is learned.
        strategy: how workers communicate.
        data: what they train on.
        measure: called in each thread after the last step.
        optimizer: makes the optimizer of a model.
        rate: the learning rate of a step.
        size: of the model.
        record: whether strategies are told the loss of each step.
        timeout: of a message, in seconds.
    """
    shards, seed = task.shards(data.workers, split=data.split, seed=data.seed), data.seed

    def body(comm: Comm) -> Found:
        model = task.model(size, seed=seed)
        moves = optimizer(model)
        worker = attach(model, moves, strategy, comm=comm, seed=seed)

        def batch(step: int, size: int) -> Batch:
            return task.batch(shards[comm.rank], step, batch_size=size, seed=seed, rank=comm.rank)

        before = comm.meter.payload_bytes
        for step in range(data.steps):
            for group in moves.param_groups:
                group["lr"] = rate(step)
            moves.zero_grad()
            loss = task.loss(model, batch(step, data.batch_size))
            loss.backward()
            if record:
                worker.record_batch(loss=loss)
            moves.step()
        return measure(Trained(comm, model, worker, comm.meter.payload_bytes - before, batch))

    return run_threads(data.workers, body, timeout=timeout)
