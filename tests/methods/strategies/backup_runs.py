# SPDX-License-Identifier: Apache-2.0
"""A loop as it is written for backup workers, ranks that pause, and the comparison with one process."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor, nn

from tests.engine import batch, flat, net
from tests.oracles.backup import backup_workers
from thinwire import Worker
from thinwire.asynchronous.backup_workers import BackupWorkers
from thinwire.asynchronous.quorum.log import memberships

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def no_pause(rank: int, step: int) -> float:
    return 0.0


def stalls(rank: int, step: int) -> float:
    """One step in five takes longer."""
    return 0.02 if random.Random(100 * rank + step).random() < 0.2 else 0.0


def slow_last(rank: int, step: int) -> float:
    return 0.03 if rank == 3 else 0.001


@dataclass
class Run:
    """What one rank has seen.

    Attributes:
        digests: of the parameters after each step that this rank took itself.
        metrics: after each of these steps.
        log: the members of every step.
        values: the parameters at the end.
        sent: bytes.
    """

    digests: dict[int, str] = field(default_factory=dict[int, str])
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    log: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    values: list[float] = field(default_factory=list[float])
    sent: float = 0.0

    @property
    def x(self) -> Tensor:
        return torch.tensor(self.values)


def train(
    worker: Worker,
    steps: int,
    pause: Callable[[int, int], float] = no_pause,
    *,
    ends: bool = True,
    clip: float = inf,
) -> Run:
    """Train until the worker has done `steps`; each step pauses for `pause(rank, step)` seconds."""
    seen, rank, optimizer = Run(), worker.comm.rank, worker.optimizer
    while worker.step < steps:
        optimizer.zero_grad()
        loss = loss_of(worker.model, rank, worker.step)
        time.sleep(pause(rank, worker.step))
        loss.backward()
        if clip < inf:
            nn.utils.clip_grad_norm_(worker.model.parameters(), clip)
        optimizer.step()
        seen.digests[worker.step] = hashlib.sha256(flat(worker.model).numpy().tobytes()).hexdigest()
        seen.metrics.append(worker.metrics())
    if ends:
        worker.detach()
    seen.values, seen.log = flat(worker.model).tolist(), list(memberships(worker.replicas[0]))
    seen.sent = worker.comm.meter.payload_bytes
    return seen


def check_runs(
    runs: Sequence[Run],
    strategy: BackupWorkers,
    make_optimizer: MakeOptimizer,
    *,
    clip: float = inf,
) -> None:
    """All ranks held the same bits at every step, and those are what one process computes from the log."""
    first, size = runs[0], len(runs)
    digests: dict[int, str] = {}
    for run in runs:
        assert run.log == first.log
        assert torch.equal(run.x, first.x)
        for step, digest in run.digests.items():
            assert digests.setdefault(step, digest) == digest
    if strategy.choice == "fixed":
        assert {len(members) for members in first.log} == {size - strategy.backups}
    model = net()
    expected = backup_workers(model, make_optimizer(model), loss_of, first.log, clip=clip)
    assert first.x.tolist() == expected.tolist()
