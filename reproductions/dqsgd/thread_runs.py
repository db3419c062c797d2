# SPDX-License-Identifier: Apache-2.0
"""A task learned by threads, with an account of every byte: accuracy against the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from reproductions.shared.claims import Outcome
from reproductions.shared.threads import Schedule, unless_diverged
from thinwire.core.comm.base import Comm
from thinwire.core.comm.threads import run_threads
from thinwire.lab.tasks import Task
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.attach import attach

PATIENCE_SECONDS = 3600.0  # threads are not lost; but a long run may be put aside for others, or asleep


@dataclass(frozen=True)
class Learned:
    """What one run came to.

    Attributes:
        accuracy: of the agreed model on held-out data, or whatever the task measures.
        loss: on held-out data, in nats.
        payload_bytes: that one worker sent while it trained.
        steps: it took.
        parameters: of the model.
        wire_bytes: that one worker's interface sent meanwhile, the mean over workers; None where it was not counted.
    """

    accuracy: float
    loss: float
    payload_bytes: float
    steps: int
    parameters: int
    wire_bytes: float | None = None

    @property
    def bits_per_entry(self) -> float:
        """Payload of a step for each parameter."""
        return 8 * self.payload_bytes / self.steps / self.parameters


def learned(
    task: Task, strategy: Strategy, schedule: Schedule, *, workers: int, seed: int, model: str | None = None
) -> Learned:
    """Train on evenly divided data, one thread for each worker, and measure rank 0's account and model.

    Args:
        task: what is learned.
        strategy: how workers communicate.
        schedule: how long and how fast.
        workers: how many threads.
        seed: of the division of data, the initial parameters, the order of the data and the strategy's draws.
        model: of a named size; the task's first unless given.
    """
    shards = task.shards(workers, split="iid", seed=seed)

    def body(comm: Comm) -> Learned:
        network = task.model(model, seed=seed)
        optimizer = torch.optim.SGD(
            network.parameters(), schedule.lr, schedule.momentum, weight_decay=schedule.weight_decay
        )
        worker = attach(network, optimizer, strategy, comm=comm, seed=seed)
        before = comm.meter.payload_bytes
        for step in range(schedule.steps):
            optimizer.param_groups[0]["lr"] = schedule.rate(step)
            batch = task.batch(shards[comm.rank], step, batch_size=schedule.batch_size, seed=seed, rank=comm.rank)
            optimizer.zero_grad()
            task.loss(network, batch).backward()
            optimizer.step()
        sent = comm.meter.payload_bytes - before
        worker.detach()
        # Parameters are equal on all ranks, and models of these tasks have no buffers that differ between ranks.
        found = task.evaluate(network) if comm.rank == 0 else None
        size = sum(p.numel() for p in network.parameters())
        metric, loss = (found.metric, found.loss) if found else (0.0, 0.0)
        return Learned(metric, loss, sent, schedule.steps, size)

    worst = Learned(0.0, inf, inf, schedule.steps, 1)
    return unless_diverged(lambda: run_threads(workers, body, timeout=PATIENCE_SECONDS)[0], worst)


def weakest(outcomes: Sequence[Outcome]) -> Outcome:
    """What comes of a rule that must hold of every one of several tasks, or numbers of workers.

    Example:
        >>> weakest([Outcome.HOLDS, Outcome.NOISE]).value, weakest([Outcome.NOISE, Outcome.FAILS]).value
        ('within noise', 'does not hold')
    """
    return next(each for each in (Outcome.FAILS, Outcome.NOISE, Outcome.HOLDS) if each in outcomes)


def rate_in_words(rate: float, tried: Sequence[float]) -> str:
    """A chosen rate, and whether it lies at the edge of those that were tried.

    Example:
        >>> rate_in_words(0.1, (0.03, 0.1, 0.3)), rate_in_words(0.3, (0.03, 0.1, 0.3)), rate_in_words(1.0, [1.0])
        ('0.1', '0.3 (edge)', '1 (the only one)')
    """
    if len(tried) == 1:
        return f"{rate:g} (the only one)"
    return f"{rate:g}{' (edge)' if rate in (min(tried), max(tried)) else ''}"
