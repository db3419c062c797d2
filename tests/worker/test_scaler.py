# SPDX-License-Identifier: Apache-2.0
"""GradScaler: the decision to skip a step is made by all ranks together."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine import attach, batch, batches, flat, momentum, net, steps, threads
from tests.grids import fast_where
from thinwire import (
    AllReduce,
    Bf16,
    Budget,
    Comm,
    ErrorFeedback,
    Gossip,
    LocalSGD,
    MismatchError,
    Nearest,
    OneBit,
    PowerSGD,
    PushSum,
    SlowMo,
    Strategy,
    TopK,
    run_threads,
)

STRATEGIES = [AllReduce(), AllReduce(Bf16()), LocalSGD(2), SlowMo(period=2), Gossip(), PushSum()]


FEEDBACK = [
    AllReduce(ErrorFeedback(TopK(0.25))),
    AllReduce(ErrorFeedback(OneBit(8))),
    AllReduce(PowerSGD(1, min_ratio=0)),
    Budget(AllReduce(ErrorFeedback(Nearest(block=8))), "40B/step"),
    SlowMo(AllReduce(ErrorFeedback(TopK(0.25))), period=3),
]


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


@pytest.mark.parametrize(
    ("strategy", "clip"),
    fast_where(lambda each: STRATEGIES.index(each[0]) % 2 == each[1], product(STRATEGIES, (False, True))),
    ids=repr,
)
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


def with_residuals(comm: Comm, strategies: list[Strategy], folder: Path | None, *, enabled: bool) -> list[Tensor]:
    """Twelve steps, at a third of which each recipe begins; with a folder, by way of a checkpoint without the scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=enabled)
    worker = attach(comm, strategies[0], scaler=scaler)
    for step, data in enumerate(batches(comm.rank, 12)):
        if step in (4, 8) and folder is not None:
            worker.save(folder / str(step))
            worker = attach(comm, strategies[0], scaler=scaler)
            worker.load(folder / str(step))
        elif step in (4, 8) and len(strategies) > 1:
            assert any("error" in name for name in worker.switch(strategies[step // 4]).kept)
        if step == 10 and enabled:
            scaler.update(4.0)
        steps(worker, [data], scaler=scaler)
    state = worker.replicas[0].state
    return [flat(worker.model), *(state[name] for name in sorted(state) if "error" in name)]


def assert_scaling_changes_no_bit(strategies: list[Strategy], folder: Path | None = None) -> None:
    plain, scaled = (
        run_threads(2, lambda c, on=on: with_residuals(c, strategies, folder and folder / str(on), enabled=on))
        for on in (False, True)
    )
    for one, other in zip(plain, scaled, strict=True):
        assert len(one) > 1
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("strategy", fast_where(lambda strategy: strategy in FEEDBACK[:2], FEEDBACK), ids=repr)
def test_residuals_are_as_without_a_scaler_whatever_its_scale_becomes(strategy: Strategy) -> None:
    assert_scaling_changes_no_bit([strategy])


@pytest.mark.slow
def test_residuals_go_on_from_a_checkpoint_and_after_a_switch_under_another_scale(tmp_path: Path) -> None:
    assert_scaling_changes_no_bit([FEEDBACK[0]], tmp_path)
    assert_scaling_changes_no_bit([AllReduce(ErrorFeedback(TopK(fraction))) for fraction in (0.25, 0.5, 0.25)])


def test_an_overflow_leaves_residuals_as_they_were() -> None:
    def work(comm: Comm) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
        worker = attach(comm, FEEDBACK[0], scaler=scaler)
        state = worker.replicas[0].state
        for step, data in enumerate(batches(comm.rank, 3)):
            before = {name: each.clone() for name, each in state.items()}
            steps(worker, [data], scaler=scaler, factor=lambda _, step=step: float("inf") if step == 2 else 1.0)
        assert before
        assert all(torch.equal(each, state[name]) for name, each in before.items())

    run_threads(2, work)


def test_a_disabled_scaler_changes_nothing() -> None:
    def work(comm: Comm) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        return flat(steps(attach(comm, LocalSGD(2), scaler=scaler), batches(comm.rank, 5), scaler=scaler).model)

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
        sent, before = comm.meter.payload_bytes, flat(worker.model)
        steps(worker, batches(comm.rank, 1), scaler=scaler, factor=lambda _: float("inf") if comm.rank else 1.0)
        assert comm.meter.payload_bytes == sent
        return torch.equal(before, flat(worker.model))

    assert run_threads(2, work) == [False, True]


def test_a_scaler_on_one_rank_only_is_a_mismatch() -> None:
    def work(comm: Comm) -> None:
        attach(comm, LocalSGD(2), scaler=torch.amp.GradScaler("cpu") if comm.rank else None)

    with pytest.raises(MismatchError, match="the use of a scaler is False on rank 0 and True on rank 1"):
        run_threads(2, work)
