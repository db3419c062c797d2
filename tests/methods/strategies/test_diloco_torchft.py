# SPDX-License-Identifier: Apache-2.0
"""DiLoCo against the class of the same name in torchft's wheel, on the same gradients.

The wheel is no dependency: without it the test is skipped. `pip install torchft-nightly parameterized` makes it run. Of
the wheel only the class is used; its manager, which would need a server, is the few lines below.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire import Comm, DiLoCo, OuterOptimizer

local_sgd = pytest.importorskip(
    "torchft.local_sgd", reason="torchft's wheel is not installed: pip install torchft-nightly parameterized"
)

WORKERS, STEPS, PERIOD, WIDTH = 2, 50, 16, 5
OUTER = {"momentum": {"momentum": 0.9}, "nesterov": {"momentum": 0.9, "nesterov": True}}


class Work:
    """What an all-reduce of torchft's manager returns."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish

    def wait(self, timeout: object = None) -> bool:
        self.finish()
        return True


class Manager:
    """What torchft's class asks of its manager, over threads.

    Args:
        rank: of this worker.
        room: what all workers have in common.
    """

    _use_async_quorum = False

    def __init__(self, rank: int, room: dict[Any, Any]) -> None:
        self.rank, self.room, self.step, self.calls = rank, room, 0, 0

    def current_step(self) -> int:
        return self.step

    def start_quorum(self, *_: object, **__: object) -> None:
        pass

    def register_state_dict_fn(self, *_: object) -> None:
        pass

    def disallow_state_dict_read(self) -> None:
        pass

    def allow_state_dict_read(self) -> None:
        pass

    def should_commit(self) -> bool:
        self.step += 1
        return True

    def allreduce(self, x: Tensor, should_quantize: bool = False) -> Work:
        call, mine = self.calls, x.clone()
        self.calls += 1

        def finish() -> None:
            with self.room["lock"]:
                self.room.setdefault(call, {})[self.rank] = mine
            self.room["barrier"].wait(30)
            x.copy_(sum(self.room[call][rank] for rank in range(WORKERS)) / WORKERS)
            self.room["barrier"].wait(30)

        return Work(finish)


def model() -> nn.ModuleList:
    """Four layers of equal size, equal on all workers."""
    layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(0.4 * torch.randn(p.shape, generator=draw))
    return layers


def trained(layers: nn.ModuleList, optimizer: torch.optim.Optimizer, rank: int) -> Tensor:
    """All parameters after every step."""
    seen: list[Tensor] = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(1000 * rank + step)
        x, y = torch.randn(8, WIDTH, generator=draw), torch.randn(8, WIDTH, generator=draw)
        optimizer.zero_grad()
        for layer in layers:
            x = torch.tanh(layer(x))
        (x - y).square().mean().backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten() for p in layers.parameters()]))
    return torch.stack(seen)


def theirs(fragments: int, delay: int, mixing: float, outer: dict[str, Any]) -> list[Tensor]:
    room: dict[Any, Any] = {"lock": threading.Lock(), "barrier": threading.Barrier(WORKERS)}

    def body(rank: int) -> Tensor:
        layers, each = model(), 4 // fragments
        parts = [nn.ModuleList(list(layers)[f * each : (f + 1) * each]) for f in range(fragments)]
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
        outers = [torch.optim.SGD(part.parameters(), lr=0.7, **outer) for part in parts]
        with local_sgd.DiLoCo(
            Manager(rank, room),
            parts,
            optimizer,
            outers,
            sync_every=PERIOD,
            fragment_sync_delay=delay,
            fragment_update_alpha=mixing,
        ):
            return trained(layers, optimizer, rank)

    with ThreadPoolExecutor(WORKERS) as workers:
        return list(workers.map(body, range(WORKERS)))


def ours(fragments: int, delay: int, mixing: float, outer: dict[str, Any]) -> list[Tensor]:
    strategy = DiLoCo(
        period=PERIOD,
        outer=OuterOptimizer("SGD", lr=0.7, **outer),
        fragments=fragments,
        cut="layers",
        delay=delay,
        mixing=mixing,
    )

    def body(comm: Comm) -> Tensor:
        layers = model()
        optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
        thinwire.attach(layers, optimizer, strategy, comm=comm)
        return trained(layers, optimizer, comm.rank)

    return thinwire.run_threads(WORKERS, body)


@pytest.mark.parametrize("outer", OUTER)
def test_every_step_is_that_of_torchft_s_class(outer: str) -> None:
    for fragments, delay, mixing in product((1, 2, 4), (0, 1, 2, 3), (0.0, 0.5, 1.0)):
        settings = fragments, delay, mixing, OUTER[outer]
        for mine, reference in zip(ours(*settings), theirs(*settings), strict=True):
            largest = float((mine - reference).abs().max())
            assert largest <= 1e-6, f"fragments={fragments}, delay={delay}, mixing={mixing}: {largest:.1e}"
