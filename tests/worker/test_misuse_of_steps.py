# SPDX-License-Identifier: Apache-2.0
"""What a loop may do around a step without noticing: each is right, or is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.pool import run_processes
from thinwire.core.comm.base import Comm
from thinwire.core.comm.threads import run_threads
from thinwire.errors import ConfigError, MismatchError
from thinwire.worker.attach import attach
from thinwire.worker.worker import Worker

_DRAWING = Lock()
"""Threads share one global generator: who seeds it draws before another seeds it again."""


def network() -> nn.Module:
    with _DRAWING:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model: nn.Module, rank: int, step: int, *, scale: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + step)
    return model(scale * torch.randn(5, 3, generator=draw)).square().mean()


def train(worker: Worker, steps: range) -> None:
    for step in steps:
        loss_of(worker.model, worker.comm.rank, step).backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()


def attached(comm: Comm, recipe: str, **options: Any) -> Worker:
    model = network()
    return attach(model, SGD(model.parameters(), lr=0.1, momentum=0.9), recipe, comm=comm, **options)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


CALLS: dict[str, Callable[[Worker, Path], object]] = {
    "save()": lambda worker, folder: worker.save(folder),
    "load()": lambda worker, folder: worker.load(folder),
    "state_dict()": lambda worker, folder: worker.state_dict(),
    "load_state_dict()": lambda worker, folder: worker.load_state_dict({}),
    "switch()": lambda worker, folder: worker.switch("AllReduce()"),
    "optimizer.step()": lambda worker, folder: worker.optimizer.step(),
    "detach()": lambda worker, folder: worker.detach(),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_what_would_be_undone_is_refused_within_consensus(call: str, tmp_path: Path) -> None:
    def body(comm: Comm) -> bool:
        worker = attached(comm, "LocalSGD(period=4)")
        train(worker, range(3))
        before = weights(worker.model)
        with worker.consensus(), worker.consensus():
            agreed = weights(worker.model)
            with pytest.raises(ConfigError, match=r"within consensus\(\).*Leave the `with` block first") as caught:
                CALLS[call](worker, tmp_path)
            assert call in str(caught.value) and torch.equal(agreed, weights(worker.model))
        return torch.equal(before, agreed) == (comm.size == 1) and torch.equal(before, weights(worker.model))

    # Where another rank has raised already, detach() waits for nobody and refuses nothing.
    assert all(run_threads(1 if call == "detach()" else 2, body))
    assert not list(tmp_path.iterdir())


def with_join(comm: Comm, *, clips: bool) -> Tensor:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.5)
    worker = attach(model, optimizer, "AllReduce()", comm=comm)

    def clip() -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    for step in worker.join(range(6 if comm.rank == 0 else 2), before_step=clip if clips else None):
        loss_of(model, comm.rank, step, scale=3.0).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_a_rank_without_data_clips_as_the_others_do() -> None:
    first, second = run_threads(2, lambda comm: with_join(comm, clips=True))
    assert torch.equal(first, second)
    # What it is for: the loop's own clipping does not run there.
    first, second = run_threads(2, lambda comm: with_join(comm, clips=False))
    assert not torch.equal(first, second)


def scaled_training(comm: Comm, *, fused: bool) -> Tensor:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    worker = attach(model, optimizer, "MinibatchLocalSGD(period=2)", comm=comm, scaler=scaler)
    for step in range(6):
        scaler.scale(loss_of(model, comm.rank, step)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = weights(model)
    worker.detach()
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fused_optimizer_gets_what_a_scaler_has_unscaled(workers: int) -> None:
    plain, fused = (run_threads(workers, lambda comm, f=f: scaled_training(comm, fused=f)) for f in (False, True))
    for one, other in zip(plain, fused, strict=True):
        assert torch.allclose(one, other, atol=1e-6) and one.abs().max() < 10


def before_attach(comm: Comm) -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    loss_of(model, comm.rank, 0).backward()
    attach(model, optimizer, "AllReduce()", comm=comm)
    optimizer.step()


def within_no_sync(comm: Comm) -> None:
    worker = attached(comm, "AllReduce()")
    train(worker, range(2))
    with worker.no_sync():
        loss_of(worker.model, comm.rank, 2).backward()
    worker.optimizer.step()


def set_by_hand(comm: Comm) -> None:
    worker = attached(comm, "AllReduce()")
    parameters = list(worker.model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss_of(worker.model, comm.rank, 0), parameters), strict=True):
        p.grad = g
    worker.optimizer.step()


@pytest.mark.parametrize("body", [before_attach, within_no_sync, set_by_hand])
def test_gradients_that_were_not_exchanged_are_refused(body: Callable[[Comm], None]) -> None:
    with pytest.raises(
        ConfigError, match=r"step \d: optimizer\.step\(\) with a gradient of 0\.weight that no backward"
    ):
        run_threads(2, body)


def test_gradients_that_were_exchanged_are_not_refused() -> None:
    def body(comm: Comm) -> int:
        worker = attached(comm, "AllReduce()")
        for step in range(3):
            with worker.no_sync():
                loss_of(worker.model, comm.rank, step).backward()
            loss_of(worker.model, comm.rank, step + 10).backward()
            worker.optimizer.step()
            worker.optimizer.step()  # once more with the same gradient
            worker.optimizer.zero_grad(set_to_none=step % 2 == 0)
        worker.optimizer.step()  # with none
        return worker.step

    assert run_threads(2, body) == [7, 7]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_switch_may_follow_a_skipped_step(to_none: bool) -> None:
    def body(comm: Comm) -> str:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        worker = attached(comm, "AllReduce()", scaler=scaler)
        scaler.scale(loss_of(worker.model, comm.rank, 0) * float("inf")).backward()
        scaler.step(worker.optimizer)
        scaler.update()
        worker.optimizer.zero_grad(set_to_none=to_none)
        assert worker.step == 0
        worker.switch("SlowMo(period=2)")
        return str(worker.strategy)

    assert all("SlowMo" in found for found in run_threads(2, body))


class Cache(nn.Module):
    """A buffer that grows with the longest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.mask):
            self.mask = torch.ones(len(x))
        return self.linear(x) * self.mask[: len(x), None]


def with_cache(lengths: list[int], within: int) -> str:
    import torch.distributed as dist

    model = Cache()
    worker = attach(model, SGD(model.parameters(), lr=0.1), "LocalSGD(period=2)")
    model(torch.ones(lengths[dist.get_rank()], 3))
    try:
        with worker.consensus() as agreed:
            agreed(torch.ones(within, 3))
    except MismatchError as error:
        return str(error)
    return f"of {len(model.mask)}"


def test_a_buffer_of_another_shape_on_another_rank_is_named() -> None:
    for found in run_processes(2, with_cache, [2, 8], 2):
        assert "ranks 0 and 1 have different buffers: buffer mask is 4 float32 frozen on rank 0 and 8 " in found
    assert run_processes(2, with_cache, [2, 3], 6) == ["of 6", "of 6"]
