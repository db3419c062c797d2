# SPDX-License-Identifier: Apache-2.0
"""What a loop may do around a step without noticing: each is right, or is refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.engine import attach, batches, flat, net, sgd, squared_error, steps
from tests.pool import run_processes
from thinwire import Comm, ConfigError, MismatchError, Worker, run_threads

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
        worker = attach(comm, "LocalSGD(period=4)")
        steps(worker, batches(comm.rank, 3))
        before = flat(worker.model)
        with worker.consensus(), worker.consensus():
            agreed = flat(worker.model)
            with pytest.raises(ConfigError, match=r"within consensus\(\).*Leave the `with` block first") as caught:
                CALLS[call](worker, tmp_path)
            assert call in str(caught.value) and torch.equal(agreed, flat(worker.model))
        return torch.equal(before, agreed) == (comm.size == 1) and torch.equal(before, flat(worker.model))

    # Where another rank has raised already, detach() waits for nobody and refuses nothing.
    assert all(run_threads(1 if call == "detach()" else 2, body))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clips", [True, False])
def test_a_rank_without_data_clips_as_the_others_do(clips: bool) -> None:
    def body(comm: Comm) -> Tensor:
        worker = attach(comm, "AllReduce()", optimizer=sgd)

        def clip() -> None:
            nn.utils.clip_grad_norm_(worker.model.parameters(), 0.05)

        for step in worker.join(range(6 if comm.rank == 0 else 2), before_step=clip if clips else None):
            worker.optimizer.zero_grad()
            squared_error(worker.model, comm.rank, step).backward()
            clip()
            worker.optimizer.step()
        return flat(worker.model)

    first, second = run_threads(2, body)
    # Without `before_step` the loop's own clipping does not run on the rank without data.
    assert torch.equal(first, second) == clips


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fused_optimizer_gets_what_a_scaler_has_unscaled(workers: int) -> None:
    def body(comm: Comm, fused: bool) -> Tensor:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        make = lambda model: SGD(model.parameters(), lr=0.05, fused=fused)  # noqa: E731
        worker = attach(comm, "MinibatchLocalSGD(period=2)", optimizer=make, scaler=scaler)
        steps(worker, batches(comm.rank, 6), scaler=scaler).detach()
        assert getattr(worker.optimizer, "_step_supports_amp_scaling", False) == fused
        return flat(worker.model)

    plain, fused = (run_threads(workers, lambda comm, f=f: body(comm, f)) for f in (False, True))
    for one, other in zip(plain, fused, strict=True):
        assert torch.allclose(one, other, atol=1e-6) and one.abs().max() < 10


def test_gradients_from_before_attach_are_refused() -> None:
    def body(comm: Comm) -> None:
        model = net()
        squared_error(model, comm.rank, 0).backward()
        attach(comm, "AllReduce()", model=model).optimizer.step()

    with pytest.raises(ConfigError, match=r"step \d: optimizer\.step\(\) with a gradient of \d\.\w+ that no backward"):
        run_threads(2, body)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_switch_may_follow_a_skipped_step(to_none: bool) -> None:
    def body(comm: Comm) -> str:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        worker = attach(comm, "AllReduce()", scaler=scaler)
        steps(worker, batches(comm.rank, 1), scaler=scaler, factor=lambda _: float("inf"))
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
    worker = attach(None, "LocalSGD(period=2)", model=model)
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
