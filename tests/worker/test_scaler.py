# SPDX-License-Identifier: Apache-2.0
"""GradScaler: the decision to skip a step is made by all ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batch, batches, flat, momentum, net, threads
from thinwire import AllReduce, Bf16, Comm, Gossip, LocalSGD, MismatchError, PushSum, SlowMo, Strategy, run_threads

STRATEGIES = [AllReduce(), AllReduce(Bf16()), LocalSGD(2), SlowMo(period=2), Gossip(), PushSum()]


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def scaled(comm: Comm, strategy: Strategy, *, bad_rank: int, clip: bool = False, **settings: Any) -> tuple[Any, ...]:
    """Five steps; on one rank the loss of the third is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    worker = attach(comm, strategy, scaler=scaler, **settings)
    scales, moved = list[float](), list[bool]()
    for step, (x, y) in enumerate(batches(comm.rank, 5)):
        before = flat(worker.model)
        worker.optimizer.zero_grad()
        loss = (worker.model(x) - y).square().mean()
        if step == 2 and comm.rank == bad_rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(worker.optimizer)
            nn.utils.clip_grad_norm_(worker.model.parameters(), 1e6)
        scaler.step(worker.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        moved.append(not torch.equal(before, flat(worker.model)))
    return flat(worker.model), scales, moved, worker.step


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy: Strategy, clip: bool) -> None:
    for x, scales, moved, step in run_threads(3, lambda c: scaled(c, strategy, bad_rank=1, clip=clip)):
        assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]
        assert moved == [True, True, False, True, True]
        assert step == 4
        assert bool(torch.isfinite(x).all())


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(2)], ids=repr)
def test_an_overflow_skips_the_step_of_fused_optimizers_too(strategy: Strategy) -> None:
    for x, scales, _, _ in run_threads(2, lambda c: scaled(c, strategy, bad_rank=0, optimizer=fused)):
        assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]
        assert bool(torch.isfinite(x).all())


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_scaling_by_powers_of_two_changes_no_bit(strategy: Strategy) -> None:
    plain = threads(2, strategy, 5)
    found = run_threads(2, lambda c: scaled(c, strategy, bad_rank=-1))
    assert all(torch.equal(x, found_x) for x, (found_x, *_) in zip(plain, found, strict=True))


def test_a_disabled_scaler_changes_nothing() -> None:
    def work(comm: Comm) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        worker = attach(comm, LocalSGD(2), scaler=scaler)
        for x, y in batches(comm.rank, 5):
            worker.optimizer.zero_grad()
            scaler.scale((worker.model(x) - y).square().mean()).backward()
            scaler.step(worker.optimizer)
            scaler.update()
        return flat(worker.model)

    plain = threads(2, LocalSGD(2), 5)
    assert all(torch.equal(x, y) for x, y in zip(run_threads(2, work), plain, strict=True))


def test_one_scaler_serves_other_optimizers_alone() -> None:
    def work(comm: Comm) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        attach(comm, LocalSGD(2), scaler=scaler)
        before = comm.meter.payload_bytes
        model = net()
        other = momentum(model)
        x, y = batch(comm.rank, 0)
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.step(other)
        scaler.update()
        return comm.meter.payload_bytes - before

    assert run_threads(2, work) == [0.0, 0.0]


def test_detach_restores_the_scaler() -> None:
    def work(comm: Comm) -> bool:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        worker = attach(comm, LocalSGD(2), scaler=scaler)
        worker.detach()
        sent = comm.meter.payload_bytes
        x, y = batch(comm.rank, 0)
        scaler.scale((worker.model(x) - y).square().mean() * (float("inf") if comm.rank else 1.0)).backward()
        before = flat(worker.model)
        scaler.step(worker.optimizer)
        assert comm.meter.payload_bytes == sent
        return torch.equal(before, flat(worker.model))

    assert run_threads(2, work) == [False, True]


def test_a_scaler_on_one_rank_only_is_a_mismatch() -> None:
    def work(comm: Comm) -> None:
        attach(comm, LocalSGD(2), scaler=torch.amp.GradScaler("cpu") if comm.rank else None)

    with pytest.raises(MismatchError, match="the use of a scaler is False on rank 0 and True on rank 1"):
        run_threads(2, work)
