# SPDX-License-Identifier: Apache-2.0
"""The engine on real processes, beside torch's own DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from tests.engine import adamw, attach, batch, batches, drawn, flat, momentum, steps
from tests.pool import run_processes
from tests.worker.test_attach import Picky
from tests.worker.test_buckets import contrary, oracle_contrary
from tests.worker.test_joining import LENGTHS, joined
from thinwire import AllReduce, Bf16, Gossip, LocalSGD, PushSum, SlowMo, Strategy, Worker

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Pictures(nn.Module):
    """Convolutions, a norm and a linear head, for 6 x 6 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(48, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.repeat(1, 24).view(-1, 2, 6, 6)))


def train(
    step_model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], parts: int
) -> list[Tensor]:
    """Twenty steps of a user's loop, each in `parts` batches; returns the parameters."""
    rank = dist.get_rank()
    for step in range(20):
        if isinstance(picky := getattr(step_model, "module", step_model), Picky):
            picky.use_left = (rank + step) % 2 == 0
        optimizer.zero_grad()
        x, y = batch(rank, step, rows=8)
        for i, (inputs, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            with no_sync() if i < parts - 1 else nullcontext():
                ((step_model(inputs) - targets).square().mean() / parts).backward()
        optimizer.step()
    return [p.detach().clone() for p in step_model.parameters()]


def with_ddp(make_model: Callable[[], nn.Module], make: Make, parts: int, **settings: Any) -> list[Tensor]:
    model = DistributedDataParallel(drawn(make_model()), broadcast_buffers=False, **settings)
    return train(model, make(model), model.no_sync, parts)


def with_thinwire(make_model: Callable[[], nn.Module], make: Make, parts: int, **settings: Any) -> list[Tensor]:
    worker = attach(None, settings.pop("strategy", AllReduce()), model=drawn(make_model()), optimizer=make, **settings)
    return train(worker.model, worker.optimizer, worker.no_sync, parts)


def apart(xs: list[Tensor], ys: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(xs, ys, strict=True))


def beside_ddp() -> dict[str, float]:
    """The largest differences of parameters after twenty steps."""
    ddp = with_ddp(Pictures, momentum, 1)
    found = {
        "momentum": apart(with_thinwire(Pictures, momentum, 1), ddp),
        "adamw": apart(with_thinwire(Pictures, adamw, 1), with_ddp(Pictures, adamw, 1)),
        "accumulated": apart(with_thinwire(Pictures, momentum, 4), with_ddp(Pictures, momentum, 4)),
        "one bucket": apart(with_thinwire(Pictures, momentum, 1, bucket_bytes=1 << 20), ddp),
        "rounded": apart(with_thinwire(Pictures, momentum, 1, strategy=AllReduce(Bf16())), ddp),
    }
    unused = with_ddp(Picky, momentum, 1, find_unused_parameters=True)
    found["unused"] = apart(with_thinwire(Picky, momentum, 1, find_unused=True), unused)
    found["moved"] = float(unused[0].sub(drawn(Picky()).left.weight).abs().max())
    return found


def test_all_reduce_equals_ddp_after_twenty_steps() -> None:
    for found in run_processes(2, beside_ddp):
        assert found.pop("moved") > 0.01
        assert 0 < found.pop("rounded") < 0.02
        assert all(distance < 1e-6 for distance in found.values()), found


def skipped(strategy: Strategy) -> tuple[list[float], float, int]:
    """Five steps with a scaler; the third overflows on rank 1."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    third = float("inf") if dist.get_rank() == 1 else 1.0
    worker = attach(None, strategy, scaler=scaler)
    steps(worker, batches(worker.rank, 5), scaler=scaler, factor=lambda step: third if step == 2 else 1.0)
    return agreed(worker), scaler.get_scale(), worker.step


def agreed(worker: Worker) -> list[float]:
    with worker.consensus() as model:
        return flat(model).tolist()


def the_rest() -> dict[str, Any]:
    """Results that are compared between ranks only."""
    rank = dist.get_rank()
    comm = thinwire.GroupComm(timeout=20)
    strategies = [AllReduce(), LocalSGD(2), SlowMo(PushSum(), period=3), Gossip(), Gossip(order="after"), PushSum()]
    uneven: list[Strategy] = [AllReduce(), LocalSGD(2), PushSum(), Gossip()]
    found: dict[str, Any] = {
        "contrary": contrary(comm).tolist(),
        "consensus": [agreed(steps(attach(None, s), batches(rank, 7))) for s in strategies],
        "skipped": [skipped(s) for s in (AllReduce(), LocalSGD(2), SlowMo(period=2))],
        "joined": [
            (x.tolist(), seen, step)
            for s in uneven
            for kind in ("known", "unknown")
            for x, seen, step in [joined(comm, s, LENGTHS, kind)]
        ],
    }
    return found


def test_processes_agree_on_order_consensus_skips_and_uneven_data() -> None:
    found = run_processes(3, the_rest)
    first = found[0]
    for rank, mine in enumerate(found):
        assert mine["contrary"] == first["contrary"]
        assert mine["consensus"] == first["consensus"]
        assert mine["skipped"] == first["skipped"]
        assert [(seen, step) for _, seen, step in mine["joined"]] == [(LENGTHS[rank], 5)] * 8
        assert mine["joined"][0][0] == mine["joined"][1][0] == first["joined"][0][0]
    assert [(scale, step) for _, scale, step in first["skipped"]] == [(4.0, 4)] * 3
    torch.testing.assert_close(torch.tensor(first["contrary"]), oracle_contrary(3), rtol=1e-5, atol=1e-6)
