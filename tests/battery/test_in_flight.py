# SPDX-License-Identifier: Apache-2.0
"""What a coded message says counts once, also where a switch of strategies finds it in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.battery.cases import STRATEGIES
from tests.grids import fast_where
from tests.problems import average_outside
from thinwire import (
    EASGD,
    AllReduce,
    Budget,
    CoCoD,
    Codec,
    Comm,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    MinibatchLocalSGD,
    Nearest,
    Offloaded,
    OneBit,
    OuterOptimizer,
    OverlapLocalSGD,
    PowerSGD,
    SlowMo,
    Strategy,
    Streaming,
    TopK,
    Worker,
)
from thinwire.methods.strategies.base import nested
from thinwire.worker.worker import internals_of

SIZE, ELEMENTS, LR, AGAIN = 3, 24, 0.1, 5
SIGNS: Codec = ErrorFeedback(OneBit(8))
PLAIN = OuterOptimizer("SGD", lr=1.0)

CONSERVING: list[Strategy] = [
    AllReduce(SIGNS),
    LocalSGD(3, codec=SIGNS),
    MinibatchLocalSGD(3, inner=0.5, codec=SIGNS),
    MinibatchLocalSGD(3, inner=0.0),
    SlowMo(period=3, momentum=0.0, codec=SIGNS),
    Offloaded(SlowMo(period=3, momentum=0.0, codec=SIGNS)),
    CoCoD(3, codec=SIGNS),
    CoCoD(2, codec=ErrorFeedback(TopK(0.25))),
    CoCoD(3, codec=PowerSGD(1, 0)),
    DiLoCo(period=3, outer=PLAIN, codec=SIGNS),
    DiLoCo(period=4, outer=PLAIN, codec=SIGNS, fragments=2),
    DiLoCo(period=4, outer=PLAIN, codec=SIGNS, delay=2),
    DiLoCo(period=4, outer=PLAIN, codec=PowerSGD(1, 0), delay=2),
    DiLoCo(period=3, outer=PLAIN, codec=SIGNS, mixing=0.3),
    DiLoCo(period=4, outer=PLAIN, codec=SIGNS, delay=2, mixing=0.5),
    DiLoCo(period=4, outer=PLAIN, codec=PowerSGD(1, 0), mixing=0.5, fragments=2),
    Streaming(LocalSGD(4, codec=SIGNS), fragments=2),
    Streaming(CoCoD(4, codec=SIGNS), fragments=2),
    Budget(LocalSGD(3, codec=ErrorFeedback(Nearest(block=8))), "10B/step"),
    Budget(CoCoD(3, codec=ErrorFeedback(Nearest(block=8))), "10B/step"),
]
KINDS = [CONSERVING[place] for place in (0, 1, 2, 4, 7, 12, 13, 15, 16, 19)]
RETURNING: list[Strategy] = [
    OverlapLocalSGD(3, codec=SIGNS),
    OverlapLocalSGD(4, delay=2, codec=PowerSGD(1, 0)),
    EASGD(3, codec=SIGNS),
    EASGD(3, codec=PowerSGD(1, 0)),
]
# They send gradients or messages of graphs, with a memory that a switch keeps or drops as the reference says.
OTHERS = ["Choco", "CompressedMomentum", "ZeroOne"]


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * rank + step))


@cache
def mean_gradient(step: int) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(SIZE)]).mean(0)


def begin(comm: Comm, strategy: Strategy) -> Worker:
    model = nn.ParameterList([torch.zeros(ELEMENTS)])
    return thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=LR), strategy, comm=comm)


def go_on(worker: Worker, until: int) -> None:
    (parameter,) = worker.model.parameters()
    while worker.step < until:
        worker.optimizer.zero_grad()
        (parameter * gradient(worker.comm.rank, worker.step)).sum().backward()
        worker.optimizer.step()
    worker.optimizer.zero_grad()


def whole(worker: Worker) -> Tensor:
    """The workers' mean and all that error feedback holds back."""
    (parameter,) = worker.model.parameters()
    total, unit = parameter.detach() / SIZE, -LR if has_gradients(worker.strategy) else 1.0
    for name, x in worker.replicas[0].state.items():
        *path, last = name.split("/")
        place = 0
        if path and path[-1] == "server_error":
            place, path, last = int(last.split("-")[0]), path[:-1], "server_error"
        if last not in ("error", "server_error"):
            continue
        if path and path[0].startswith("fragment-"):
            place += int(path[0].removeprefix("fragment-")) * ELEMENTS // 2
        total[place : place + x.numel()].add_(x, alpha=unit / (SIZE if last == "error" else 1))
    return worker.comm.all_reduce_(total).wait()


def has_gradients(strategy: Strategy) -> bool:
    return isinstance(strategy, AllReduce | MinibatchLocalSGD)


def counted(strategy: Strategy, stop: int) -> Tensor:
    """Where the steps up to a switch lead, without those that a delay loses by definition."""
    lost = strategy.delay if isinstance(strategy, DiLoCo) else 0
    share = strategy.mixing if isinstance(strategy, DiLoCo) else 1.0
    total = torch.zeros(ELEMENTS)
    for step in range(stop):
        left = (-step - 1) % strategy.period + 1 if isinstance(strategy, DiLoCo) else 1
        ended = step + left <= stop
        # Of a message that is in flight a strategy that mixes knows which steps came after it.
        late = left <= lost and (ended or share == 0)
        total.sub_(mean_gradient(step), alpha=LR * (share if late else 1.0))
    return total


@pytest.mark.parametrize(
    ("strategy", "waited"),
    # Of each kind of message one strategy, in turn with and without; all where there is time for slow tests.
    fast_where(
        lambda each: each[0] in KINDS and KINDS.index(each[0]) % 2 == each[1], product(CONSERVING, (False, True))
    ),
    ids=str,
)
def test_a_switch_at_any_step_loses_nothing_and_counts_nothing_twice(strategy: Strategy, waited: bool) -> None:
    period = max(getattr(each, "period", 1) for each in nested(strategy))

    def body(comm: Comm, stop: int) -> tuple[Tensor, Tensor]:
        worker = begin(comm, strategy)
        go_on(worker, stop)
        if waited:
            internals_of(worker).wait_pending()
        worker.switch(strategy)
        first = whole(worker)
        go_on(worker, stop + AGAIN)
        worker.switch(strategy)
        return first, whole(worker)

    for stop in range(max(period - 2, 1), 2 * period + 1):
        first, second = thinwire.run_threads(SIZE, lambda comm, stop=stop: body(comm, stop), timeout=20)[0]
        torch.testing.assert_close(first, counted(strategy, stop), rtol=1e-5, atol=1e-5, msg=f"step {stop}")
        if not getattr(strategy, "delay", 0):
            torch.testing.assert_close(second, counted(strategy, stop + AGAIN), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", RETURNING, ids=str)
def test_workers_that_keep_what_a_message_leaves_out_go_on_from_their_mean(strategy: Any) -> None:
    def body(comm: Comm, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        worker = begin(comm, strategy)
        go_on(worker, stop)
        (parameter,) = worker.model.parameters()
        mean = comm.all_reduce_(parameter.detach() / SIZE).wait()
        worker.switch(strategy)
        state, x = worker.replicas[0].state, parameter.detach().clone()
        # Nothing is left to say: a message of the worker as it is would say nothing new.
        left = x - state["sent"] if "sent" in state else x
        tracked = state["mean"] if "mean" in state else state["known_anchor"]  # servers begin again at the anchor
        return mean, x, tracked.clone(), left + state.get("error", torch.zeros(1))

    for stop in range(strategy.period - 1, 2 * strategy.period + 1):
        for mean, x, tracked, left in thinwire.run_threads(SIZE, lambda comm, stop=stop: body(comm, stop), timeout=20):
            torch.testing.assert_close(x, mean)
            assert torch.equal(tracked, x)
            assert not left.any()


def test_every_strategy_with_a_codec_is_asked() -> None:
    asked = {type(each).__name__ for strategy in CONSERVING + RETURNING for each in nested(strategy)}
    coded = {type(each).__name__ for case in STRATEGIES for each in nested(case.strategy) if hasattr(each, "codec")}
    assert coded - asked == set(OTHERS)


@pytest.mark.parametrize(
    "strategy", [DiLoCo(period=4, outer=PLAIN, codec=SIGNS, delay=2), CoCoD(3, codec=SIGNS)], ids=str
)
@pytest.mark.parametrize("stop", range(1, 9))
def test_an_average_from_outside_counts_the_message_in_flight(stop: int, strategy: Strategy) -> None:
    def body(comm: Comm) -> Tensor:
        worker = begin(comm, strategy)
        go_on(worker, stop)
        with torch.no_grad():
            average_outside(strategy, worker.replicas[0])
        return whole(worker)

    found = thinwire.run_threads(SIZE, body, timeout=20)[0]
    torch.testing.assert_close(found, counted(strategy, stop), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stop", range(3, 9))
def test_another_number_of_workers_goes_on_with_the_message_in_flight(stop: int, tmp_path: Any) -> None:
    strategy = CoCoD(3, codec=ErrorFeedback(TopK(0.25)))

    def save(comm: Comm) -> None:
        worker = begin(comm, strategy)
        go_on(worker, stop)
        worker.save(tmp_path)

    thinwire.run_threads(SIZE, save, timeout=20)

    def resume(comm: Comm) -> Tensor:
        worker = begin(comm, replace(strategy))
        worker.load(tmp_path)
        worker.switch(strategy)
        (parameter,) = worker.model.parameters()
        return parameter.detach() + worker.replicas[0].state["error"]

    torch.testing.assert_close(
        thinwire.run_threads(1, resume, timeout=20)[0], counted(strategy, stop), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("step", [1, 2, 3])
def test_with_weights_another_number_of_workers_and_a_switch_go_on_from_the_weighted_mean(step: int) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = begin(comm, DiLoCo(period=4, outer=PLAIN, weights="samples", fragments=2))
        for each in range(1, step + 1):
            worker.record_batch(num_samples=1 + 3 * comm.rank)
            go_on(worker, each)
        (replica,) = worker.replicas
        x = replica.x.clone()
        with torch.no_grad():
            internals_of(worker).wait_pending()
            points = [worker.strategy.average(replica, at).clone() for at in ("resume", "end")]
            return x, *points

    ranks = thinwire.run_threads(SIZE, work)
    samples = torch.tensor([1.0, 4.0, 7.0])
    weighted = (torch.stack([x for x, _, _ in ranks]) * samples[:, None]).sum(0) / samples.sum()
    for _, *points in ranks:
        for point in points:
            assert torch.allclose(point, weighted, atol=1e-6)
