# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD on shared parameters: no update is lost, and stale gradients need small steps."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, flat, momentum, net, steps
from tests.oracles.backup import async_sgd
from tests.pool import run_processes
from thinwire import Comm, ConfigError, Replica, run_threads
from thinwire.asynchronous.parameter_server import ParameterServer

DOUBLE = torch.float64


class Schedule:
    """Workers take their steps one at a time, in a given order."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._next, self._changed = order, 0, threading.Condition()

    def run(self, rank: int, act: Callable[[], None]) -> None:
        """All steps of one worker."""
        for place in (place for place, each in enumerate(self._order) if each == rank):
            with self._changed:
                assert self._changed.wait_for(lambda place=place: self._next == place, 20)
            act()
            with self._changed:
                self._next += 1
                self._changed.notify_all()


def run_in_order(
    strategy: ParameterServer, order: list[int], size: int, gradient: Callable[[int, Tensor], Tensor], rate: float
) -> list[tuple[Tensor, list[int]]]:
    """The shared parameters at the end and each part's number of updates; all read zeros before the first step."""
    schedule = Schedule(order)

    def body(comm: Comm) -> tuple[Tensor, list[int]]:
        r = Replica(torch.zeros(5, dtype=DOUBLE), torch.empty(0), comm, lr=lambda: rate)
        strategy.start(r)

        def step(update: Tensor | float) -> None:
            r.x.add_(update)
            r.step += 1
            strategy.after_step(r)

        step(0.0)
        r.wait_pending()
        # Pushes of workers that were at the barrier are answered once this worker has taken a step after it.
        with comm.mailbox(r).changed:
            r.state["barriers_at_step"].fill_(1)
            r.state["version"].zero_()
            r.state["version_read"].zero_()
        comm.all_gather(torch.zeros(1)).wait()
        schedule.run(comm.rank, lambda: step(-rate * gradient(comm.rank, r.x)))
        x = strategy.average(r)
        count = int(r.state["version"])
        comm.close_mailbox(r)
        return x, [count]

    return run_threads(size, body, timeout=20)


def quadratics(size: int) -> tuple[Tensor, Callable[[int, Tensor], Tensor]]:
    centre = torch.randn(size, 5, generator=torch.Generator().manual_seed(size), dtype=DOUBLE)
    return centre, lambda rank, x: (0.5 + 0.1 * rank) * (x - centre[rank])


@pytest.mark.parametrize("scaling", ["none", "staleness"])
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), (4, 2)])
def test_it_equals_its_oracle_in_any_order_of_steps(scaling: Any, size: int, seed: int) -> None:
    draw = random.Random(seed)
    order = [draw.randrange(size) for _ in range(40)]
    _, gradient = quadratics(size)
    expected, _ = async_sgd(gradient, torch.zeros(5, dtype=DOUBLE), 0.1, order, scaled=scaling == "staleness")
    for x, counts in run_in_order(ParameterServer(scaling), order, size, gradient, 0.1):
        assert (x - expected).abs().max() < 1e-14
        assert counts == [40]


@pytest.mark.parametrize("staleness", [0, 1, 2, 4, 9])
@pytest.mark.parametrize(("share", "stable"), [(0.999, True), (1.001, False)])
def test_the_limit_of_the_docstring_is_where_the_recursion_s_roots_leave_the_unit_circle(
    staleness: int, share: float, stable: bool
) -> None:
    rate = share * 2 * math.sin(math.pi / (2 * (2 * staleness + 1)))
    companion = torch.diag(torch.ones(staleness, dtype=DOUBLE), -1)
    companion[0, 0] += 1
    companion[0, -1] -= rate
    assert (float(torch.linalg.eigvals(companion).abs().max()) < 1) == stable


@pytest.mark.parametrize(("size", "limit"), [(2, 1.0), (5, 0.3473)])
@pytest.mark.parametrize("share", [0.85, 1.15])
def test_workers_in_turn_converge_below_the_limit_of_their_staleness_and_diverge_above(
    size: int, limit: float, share: float
) -> None:
    order = [rank for _ in range(50) for rank in range(size)]
    found = run_in_order(ParameterServer(), order, size, lambda rank, x: x - 1, share * limit)[0][0]
    assert bool(found.isfinite().all() and (found - 1).abs().max() < 0.5) is (share < 1)


def test_scaling_by_staleness_bears_longer_steps() -> None:
    order = [rank for _ in range(60) for rank in range(5)]
    found = run_in_order(ParameterServer("staleness"), order, 5, lambda rank, x: x - 1, 1.15 * 0.3473)[0][0]
    assert (found - 1).abs().max() < 1e-3


@pytest.mark.parametrize("size", [2, 4])
def test_no_update_is_lost_at_any_speeds(size: int) -> None:
    draw = torch.Generator().manual_seed(size)
    updates = torch.randn(size, 30, 7, generator=draw, dtype=DOUBLE)

    def body(comm: Comm) -> tuple[Tensor, float]:
        r = Replica(torch.zeros(7, dtype=DOUBLE), torch.empty(0), comm, lr=lambda: 1.0)
        strategy = ParameterServer()
        strategy.start(r)
        for step, update in enumerate(updates[comm.rank]):
            time.sleep(0.001 * (comm.rank + step % 2))
            r.x.add_(update)
            r.step += 1
            strategy.after_step(r)
        x = strategy.average(r)
        comm.close_mailbox(r)
        return x, float(r.state["version"])

    for x, count in run_threads(size, body, timeout=20):
        assert torch.allclose(x, updates.sum((0, 1)), rtol=0, atol=1e-12)
        assert count == 30 * size


def test_a_worker_at_a_barrier_is_not_moved_by_workers_that_continue() -> None:
    def body(comm: Comm) -> bool:
        r = Replica(torch.zeros(4, dtype=DOUBLE), torch.empty(0), comm, lr=lambda: 1.0)
        strategy = ParameterServer()
        strategy.start(r)

        def step() -> None:
            r.x.add_(1.0)
            r.step += 1
            strategy.after_step(r)

        step()
        r.wait_pending()
        before = r.state["published"].clone()
        time.sleep(0.1 * comm.rank)
        unmoved = torch.equal(r.state["published"], before) or comm.rank == 0
        step()
        r.wait_pending()
        comm.close_mailbox(r)
        return unmoved

    assert run_threads(2, body, timeout=20) == [True, True]


def test_one_worker_alone_is_its_optimizer() -> None:
    model = net()
    worker = thinwire.attach(model, momentum(model), ParameterServer())
    steps(worker, batches(0, 5))
    other = net()
    optimizer = momentum(other)
    for x, y in batches(0, 5):
        optimizer.zero_grad()
        (other(x) - y).square().mean().backward()
        optimizer.step()
    assert torch.equal(flat(model), flat(other))


def trains() -> tuple[list[float], dict[str, float]]:
    worker = attach(None, ParameterServer(), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.02))
    steps(worker, batches(worker.comm.rank, 20))
    seen = worker.metrics()
    with worker.consensus() as model:
        agreed = flat(model).tolist()
    worker.detach()
    return agreed, seen


def test_processes_agree_on_what_the_parameters_have_become() -> None:
    found = run_processes(3, trains)
    assert all(x == found[0][0] for x, _ in found)
    assert all(math.isfinite(value) for value in found[0][0])
    assert all(seen["staleness_steps"] >= 0 for _, seen in found)


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="scaling"):
        ParameterServer("sometimes")  # type: ignore[arg-type]
