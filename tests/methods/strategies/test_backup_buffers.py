# SPDX-License-Identifier: Apache-2.0
"""Buffers under backup workers: a late worker takes the others' parameters and keeps its own running statistics."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batch, drawn, flat, momentum
from tests.methods.strategies.backup_runs import loss_of
from tests.oracles.backup import backup_workers
from thinwire import BackupWorkers, Comm, run_threads
from thinwire.asynchronous.quorum.log import memberships

STEPS = 12


def normed() -> nn.Sequential:
    return drawn(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def running_mean(rank: int, steps: list[int]) -> Tensor:
    """The running mean of a layer on the inputs after the batches of these steps, with torch's momentum of 0.1."""
    mean = torch.zeros(3)
    for step in steps:
        mean = 0.9 * mean + 0.1 * batch(rank, step)[0].mean(0)
    return mean


def body(comm: Comm) -> tuple[list[float], list[int], list[float], list[float], list[tuple[int, ...]]]:
    """Train with one slow rank: the parameters, the steps taken, the running mean, its mean over ranks, and the log."""
    model = normed()
    worker, taken = attach(comm, BackupWorkers(), model=model), list[int]()
    while worker.step < STEPS:
        taken.append(worker.step)
        worker.optimizer.zero_grad()
        loss = loss_of(model, comm.rank, worker.step)
        time.sleep(0.03 if comm.rank == 3 else 0.002)
        loss.backward()
        worker.optimizer.step()
    running = model[0].running_mean
    assert isinstance(running, Tensor)
    with worker.consensus():
        mean = running.tolist()
    log = list(memberships(worker.replicas[0]))
    worker.detach()
    return flat(model).tolist(), taken, running.tolist(), mean, log


def test_a_late_worker_keeps_its_own_statistics_and_consensus_is_their_mean() -> None:
    runs = run_threads(4, body, timeout=20)
    log, model = runs[0][-1], normed()
    assert len(runs[3][1]) < STEPS
    expected = backup_workers(model, momentum(model), loss_of, log)
    everyone = torch.tensor([run[2] for run in runs]).mean(0).tolist()
    for rank, (x, taken, running, mean, _) in enumerate(runs):
        assert torch.equal(torch.tensor(x), expected)
        assert running == pytest.approx(running_mean(rank, taken).tolist(), abs=1e-6)
        assert mean == pytest.approx(everyone, abs=1e-6)
