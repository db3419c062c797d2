# SPDX-License-Identifier: Apache-2.0
"""Torch's schedulers across a checkpoint: their own state, and what they keep in the optimizer's groups."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, MultiStepLR, OneCycleLR, SequentialLR

from tests.engine import attach, batches, flat, steps
from thinwire import AllReduce, CheckpointError, Comm, LocalSGD, Strategy, Worker, run_threads
from thinwire.worker.replica_state import pack
from thinwire.worker.worker import internals_of


def in_two_phases(optimizer: Optimizer) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer, total_iters=3), MultiStepLR(optimizer, [2, 4])], [3])


def trained(worker: Worker, schedule: Any, first: int, count: int) -> list[float]:
    """The rates of some steps under a schedule."""
    rates: list[float] = []
    for step in range(first, first + count):
        steps(worker, batches(worker.comm.rank, 1, step))
        schedule.step()
        rates.append(worker.optimizer.param_groups[0]["lr"])
    return rates


def test_a_schedule_of_milestones_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    def work(comm: Comm) -> list[list[float]]:
        whole = attach(comm, AllReduce())
        expected = trained(whole, in_two_phases(whole.optimizer), 0, 8)
        whole.detach()
        worker = attach(comm, AllReduce())
        schedule = in_two_phases(worker.optimizer)
        rates = trained(worker, schedule, 0, 2)
        worker.save(tmp_path, extra={"schedule": schedule.state_dict()})
        worker.detach()
        worker = attach(comm, AllReduce())
        schedule = in_two_phases(worker.optimizer)
        saved = worker.load(tmp_path)["schedule"]
        assert type(saved["_schedulers"][1]["milestones"]) is Counter
        schedule.load_state_dict(saved)
        return [expected, rates + trained(worker, schedule, 2, 6)]

    for expected, rates in run_threads(2, work):
        assert rates == expected


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=2)], ids=repr)
def test_a_schedule_made_after_loading_goes_on_from_the_saved_initial_rate(
    strategy: Strategy, workers: int, tmp_path: Path
) -> None:
    def save(comm: Comm) -> list[float]:
        worker = attach(comm, strategy)
        schedule = CosineAnnealingLR(worker.optimizer, T_max=10)
        trained(worker, schedule, 0, 4)
        worker.save(tmp_path, extra={"epoch": schedule.last_epoch})
        return trained(worker, schedule, 4, 3)

    def go_on(comm: Comm) -> list[float]:
        worker = attach(comm, strategy)
        epoch = worker.load(tmp_path)["epoch"]
        assert worker.optimizer.param_groups[0]["initial_lr"] == 0.05
        # Torch's own pattern: the constructor asks the groups for `initial_lr`, and takes one step of its own.
        schedule = CosineAnnealingLR(worker.optimizer, T_max=10, last_epoch=epoch - 1)
        return trained(worker, schedule, 4, 3)

    expected = run_threads(2, save)[0]
    for rates in run_threads(workers, go_on):
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_schedule_that_is_new_in_the_resumed_run_keeps_what_it_has_put_into_the_groups(
    workers: int, tmp_path: Path
) -> None:
    def save(comm: Comm) -> None:
        steps(attach(comm, AllReduce()), batches(comm.rank, 2)).save(tmp_path)

    def go_on(comm: Comm) -> tuple[dict[str, Any], list[float]]:
        worker = attach(comm, AllReduce())
        schedule = OneCycleLR(worker.optimizer, max_lr=0.1, total_steps=10)
        before = {k: v for k, v in worker.optimizer.param_groups[0].items() if k not in ("params", "lr", "momentum")}
        worker.load(tmp_path)
        after = worker.optimizer.param_groups[0]
        assert after["lr"] == 0.05  # the checkpoint's, as of everything that it has
        assert {k: after[k] for k in before} == before
        return before, trained(worker, schedule, 2, 3)

    run_threads(2, save)
    for before, rates in run_threads(workers, go_on):
        assert {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"} < before.keys()
        assert rates[0] < rates[1] > rates[2]  # its peak is at 3 of 10 steps
        assert rates[1] == pytest.approx(0.1)


def test_other_names_in_a_group_are_still_refused_and_so_is_a_rate_that_is_none() -> None:
    (worker,) = run_threads(1, lambda comm: attach(comm, AllReduce()))
    before = flat(worker.model)
    part = pack(internals_of(worker))
    for forged, words in (
        ({"tempo": 1.0}, "optimizer group 0 has the unknown entry 'tempo'"),
        ({"initial_lr": "fast"}, "initial_lr of optimizer group 0 is 'fast' in the checkpoint"),
        ({"initial_lr": float("nan")}, "initial_lr of optimizer group 0 is nan in the checkpoint"),
    ):
        groups = [{**group, **forged} for group in part["optimizer"]["param_groups"]]
        with pytest.raises(CheckpointError, match=words):
            worker.load_state_dict({"rank-0000": {**part, "optimizer": {**part["optimizer"], "param_groups": groups}}})
    assert torch.equal(before, flat(worker.model))
