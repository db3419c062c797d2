# SPDX-License-Identifier: Apache-2.0
"""A task learned by threads, with an account of every byte: accuracy against the bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean

from reproductions.shared.threads import Data, Schedule, Trained, on_threads, unless_diverged
from thinwire import Strategy
from thinwire.lab.tasks import Evaluation, Task

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
    data = Data(workers, "iid", seed, schedule.steps, schedule.batch_size)

    def measure(done: Trained) -> Learned:
        done.worker.detach()
        # Parameters are equal on all ranks, and models of these tasks have no buffers that differ between ranks.
        found = task.evaluate(done.model) if done.comm.rank == 0 else Evaluation(0.0, 0.0, 0)
        size = sum(p.numel() for p in done.model.parameters())
        return Learned(found.metric, found.loss, done.sent, schedule.steps, size)

    run = partial(on_threads, task, strategy, data, measure, optimizer=schedule.descent, rate=schedule.rate, size=model)
    worst = Learned(0.0, inf, inf, schedule.steps, 1)
    return unless_diverged(lambda: run(record=False, timeout=PATIENCE_SECONDS)[0], worst)


def rate_in_words(rate: float, tried: Sequence[float]) -> str:
    """A chosen rate, and whether it lies at the edge of those that were tried.

    Example:
        >>> rate_in_words(0.1, (0.03, 0.1, 0.3)), rate_in_words(0.3, (0.03, 0.1, 0.3)), rate_in_words(1.0, [1.0])
        ('0.1', '0.3 (edge)', '1 (the only one)')
    """
    if len(tried) == 1:
        return f"{rate:g} (the only one)"
    return f"{rate:g}{' (edge)' if rate in (min(tried), max(tried)) else ''}"


def mean_of(runs: Sequence[Learned], name: str) -> float:
    """The mean of one figure over runs."""
    return fmean(getattr(run, name) for run in runs)


def in_words(runs: Sequence[Learned]) -> str:
    """Accuracy with its range, and loss."""
    accuracies = [run.accuracy for run in runs]
    span = f"{min(accuracies):.4f} to {max(accuracies):.4f}"
    return f"accuracy {fmean(accuracies):.4f} ({span}), loss {mean_of(runs, 'loss'):.4f}"
