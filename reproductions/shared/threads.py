# SPDX-License-Identifier: Apache-2.0
"""A task trained by threads of one process: no sockets, no clock, the same figures every time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from thinwire.comm.base import Comm
from thinwire.comm.threads import run_threads
from thinwire.strategies.base import Strategy
from thinwire.tasks import Evaluation, Task
from thinwire.worker.worker import attach


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
    shards = task.shards(workers, split=split, seed=seed)

    def body(comm: Comm) -> Evaluation:
        model = task.model(seed=seed)
        optimizer = torch.optim.SGD(
            model.parameters(), schedule.lr, schedule.momentum, weight_decay=schedule.weight_decay
        )
        worker = attach(model, optimizer, strategy, comm=comm, seed=seed)
        for step in range(schedule.steps):
            optimizer.param_groups[0]["lr"] = schedule.rate(step)
            batch = task.batch(shards[comm.rank], step, batch_size=schedule.batch_size, seed=seed, rank=comm.rank)
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            loss.backward()
            worker.record_batch(loss=loss)
            optimizer.step()
        with worker.consensus() as agreed:
            found = task.evaluate(agreed)
        worker.detach()
        return found

    return run_threads(workers, body)[0]
