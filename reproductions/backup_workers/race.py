# SPDX-License-Identifier: Apache-2.0
"""Workers as threads race the clock: some stall now and then, or one is always slow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import fmean

import torch
from torch import Tensor

from reproductions.shared.threads import unless_diverged
from thinwire import Comm, ParameterServer, Strategy, Worker, attach, run_threads
from thinwire.asynchronous.quorum.log import memberships
from thinwire.asynchronous.quorum.rules import best_number
from thinwire.lab.emulate import Straggler
from thinwire.lab.tasks import Task

Delays = Callable[[int, int], Straggler]
"""Of (rank, seed): what makes a worker late."""


@dataclass(frozen=True)
class Race:
    """How long and how fast to train.

    Args:
        seconds: of training.
        step_seconds: that a worker's step takes at least, slept.
        batch_size: examples a step and worker.
        lr: the learning rate of SGD.
        momentum: of SGD.
        workers: how many threads.
        looks: how often the parameters are kept, evenly over the time.
    """

    seconds: float
    step_seconds: float
    batch_size: int
    lr: float
    momentum: float = 0.0
    workers: int = 4
    looks: int = 24


@dataclass(frozen=True)
class Ran:
    """One race.

    Attributes:
        seconds: when the parameters were kept.
        losses: of them on held-out data.
        steps: updates of the parameters in all.
        shares: the share of steps to which each rank has contributed.
        best: the number of workers to wait for, by the times that their steps took.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    steps: int
    shares: tuple[float, ...]
    best: int

    @property
    def end(self) -> float:
        """The mean of the last three losses, as one alone is noise; infinite where training diverged."""
        mean = fmean(self.losses[-3:])
        return mean if isfinite(mean) else inf


@dataclass
class Clock:
    """Ends all workers at the same step, and keeps what the first to come knows."""

    race: Race
    began: float = 0.0
    last: float = float("inf")
    farthest: int = -1
    kept: list[tuple[float, Tensor]] = field(default_factory=list[tuple[float, Tensor]])
    taken: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def goes_on(self, step: int, *, alone: bool) -> bool:
        """Whether a worker begins this step: all that somebody has begun are ended by all."""
        with self.lock:
            self.began = self.began or time.perf_counter()
            if time.perf_counter() - self.began > self.race.seconds:
                self.last = min(self.last, -1 if alone else self.farthest + 1)
            if step >= self.last:
                return False
            self.farthest = max(self.farthest, step)
            return True

    def keep(self, rank: int, worker: Worker, taken: float) -> None:
        """Note how long a step took, and the parameters if it is time."""
        with self.lock:
            now = time.perf_counter() - self.began
            self.taken.setdefault(rank, []).append(taken)
            if now >= len(self.kept) * self.race.seconds / self.race.looks:
                self.kept.append((now, worker.replicas[0].x.clone()))


def run_race(task: Task, strategy: Strategy, race: Race, delays: Delays, *, seed: int) -> Ran:
    """Train until the time is up, and measure what was known when.

    Args:
        task: what is learned, with the model of its default size.
        strategy: how workers communicate.
        race: how long and how fast.
        delays: what makes workers late.
        seed: of the first parameters, the order of the data and the delays.

    Returns:
        Of a race that diverges, one loss, which is infinite.
    """
    worst = Ran((race.seconds,), (inf,), 0, (0.0,) * race.workers, race.workers)
    return unless_diverged(lambda: _run_race(task, strategy, race, delays, seed), worst)


def _run_race(task: Task, strategy: Strategy, race: Race, delays: Delays, seed: int) -> Ran:
    clock, alone = Clock(race), isinstance(strategy, ParameterServer)

    def body(comm: Comm) -> tuple[int, list[tuple[int, ...]]]:
        model = task.model(seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), race.lr, race.momentum)
        worker = attach(model, optimizer, strategy, comm=comm, seed=seed)
        shard = task.shards(race.workers, split="iid", seed=seed)[comm.rank]
        delay, turn = delays(comm.rank, seed), 0
        while clock.goes_on(worker.step, alone=alone):
            start = time.perf_counter()
            batch = task.batch(shard, turn, batch_size=race.batch_size, seed=seed, rank=comm.rank)
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            time.sleep(race.step_seconds)
            delay.pause(turn, race.step_seconds)
            taken = time.perf_counter() - start
            loss.backward()
            optimizer.step()
            turn += 1
            clock.keep(comm.rank, worker, taken)
        worker.detach()
        return (turn if alone else worker.step), list(memberships(worker.replicas[0]))

    ended = run_threads(race.workers, body)
    log = ended[0][1]
    used = [sum(rank in members for members in log) / max(1, len(log)) for rank in range(race.workers)]
    seconds, losses = _measured(task, clock.kept, seed)
    steps = sum(turns for turns, _ in ended) if alone else ended[0][0]
    return Ran(seconds, losses, steps, tuple(used), best_number(list(clock.taken.values())))


def _measured(task: Task, kept: list[tuple[float, Tensor]], seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The held-out loss of all that was kept."""
    model = task.model(seed=seed)
    losses: list[float] = []
    for _, x in kept:
        torch.nn.utils.vector_to_parameters(x, model.parameters())
        losses.append(task.evaluate(model).loss)
    return tuple(now for now, _ in kept), tuple(losses)
