# SPDX-License-Identifier: Apache-2.0
"""Slow momentum and its bases tuned alike on one task, by threads of one process: the same figures every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from statistics import fmean

import torch
from torch import nn

from reproductions.shared.committed import Records
from reproductions.shared.threads import Data, Trained, on_threads, unless_diverged
from thinwire import Worker, parse
from thinwire.core.modes import evaluation_mode
from thinwire.lab.tasks import Batch, Task


@dataclass(frozen=True)
class Plan:
    """What all runs have in common.

    Args:
        task: what is learned.
        workers: how many threads.
        steps: optimizer steps; the learning rate rises over the first tenth and falls in a cosine to a tenth.
        batch_size: examples a step and worker.
        momentum: of the workers' own SGD.
        split: how the examples are dealt out, as tasks say it.
    """

    task: Task
    workers: int
    steps: int
    batch_size: int
    momentum: float = 0.9
    split: str = "iid"

    def rate(self, lr: float, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = max(1, self.steps // 10)
        if step < warm:
            return lr * (step + 1) / warm
        done = torch.tensor((step - warm) / (self.steps - warm), dtype=torch.float64)
        return lr * (0.55 + 0.45 * float(torch.cos(torch.pi * done)))


@dataclass(frozen=True)
class Trial:
    """One setting of one method."""

    recipe: str
    lr: float


@dataclass(frozen=True)
class Figures:
    """What came of one run: losses of the consensus model in nats, and its accuracy."""

    train_loss: float
    held_out_loss: float
    accuracy: float


Progress = Callable[[Trial, int], None]
Run = Callable[["Plan", Trial, int], Figures]
Runs = Mapping[str, Mapping[Trial, Sequence[Figures]]]


def run(plan: Plan, trial: Trial, seed: int) -> Figures:
    """Train and measure; the seed decides first parameters, the deal and the order of data.

    Returns:
        Of a run that diverges, infinite losses, and an accuracy of 0.
    """
    return unless_diverged(lambda: _run(plan, trial, seed), Figures(inf, inf, 0.0))


def _run(plan: Plan, trial: Trial, seed: int) -> Figures:
    data = Data(plan.workers, plan.split, seed, plan.steps, plan.batch_size)

    def measure(done: Trained) -> tuple[float, Figures | None]:
        return _measured(done.worker, plan.task, done.batch(plan.steps, 128))

    def descent(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=trial.lr, momentum=plan.momentum)

    rate = partial(plan.rate, trial.lr)
    results = on_threads(plan.task, parse(trial.recipe), data, measure, optimizer=descent, rate=rate)
    found = results[0][1]
    assert found is not None
    return Figures(fmean(loss for loss, _ in results), found.held_out_loss, found.accuracy)


def kept(records: Records) -> Run:
    """Runs whose figures are kept, so that a study which was broken off continues where it was."""

    def figures(plan: Plan, trial: Trial, seed: int) -> Figures:
        name = repr((plan.task.name, replace(plan, task=None), trial, seed))  # pyright: ignore[reportArgumentType]
        if records.get(name) is None:
            records.put(name, asdict(run(plan, trial, seed)), file="trials")
        known = records.get(name) or {}
        return Figures(known["train_loss"], known["held_out_loss"], known["accuracy"])

    return figures


def _measured(worker: Worker, task: Task, seen: Batch) -> tuple[float, Figures | None]:
    """The consensus model's loss on this worker's own data, and of rank 0 its figures on what is held out."""
    with worker.consensus() as model:
        train_loss = _loss(task, model, seen)
        found = task.evaluate(model) if worker.rank == 0 else None
    worker.detach()
    return train_loss, None if found is None else Figures(train_loss, found.loss, found.metric)


def _loss(task: Task, model: nn.Module, batch: Batch) -> float:
    with evaluation_mode(model), torch.inference_mode():
        return float(task.loss(model, batch))


def tuned(
    plan: Plan, grids: Mapping[str, Sequence[Trial]], seeds: Sequence[int], told: Progress, run: Run = run
) -> Runs:
    """Every trial of every method, with every seed."""
    found: dict[str, dict[Trial, list[Figures]]] = {name: {} for name in grids}
    for name, trials in grids.items():
        for trial in trials:
            for seed in seeds:
                told(trial, seed)
                found[name].setdefault(trial, []).append(run(plan, trial, seed))
    return found


def best(runs: Mapping[Trial, Sequence[Figures]]) -> Trial:
    """The trial with the lowest mean held-out loss."""
    return min(runs, key=lambda trial: fmean(each.held_out_loss for each in runs[trial]))
