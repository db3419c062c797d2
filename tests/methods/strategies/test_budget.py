# SPDX-License-Identifier: Apache-2.0
"""A budget of bytes: what is sent stays within it and uses it, alike on all ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.rules import refusals
from thinwire import (
    AllReduce,
    Budget,
    ChunkedTopK,
    CoCoD,
    Codec,
    Comm,
    DiLoCo,
    ErrorFeedback,
    Gathered,
    Gossip,
    LocalSGD,
    Nearest,
    NodeAverage,
    OneBit,
    OverlapLocalSGD,
    PowerSGD,
    Quantize,
    RandomK,
    Replica,
    SlowMo,
    Strategy,
    TopK,
)
from thinwire.core.comm.runtime import Runtime
from thinwire.core.replica.flat import Segment
from thinwire.methods.strategies.base import gradient_buffer

CODEC = ErrorFeedback(Nearest(4, 64))
LENGTH = 20_000


def run(comm: Comm, strategy: Strategy, steps: int, seconds: Any) -> tuple[list[float], list[float], list[float]]:
    """Bytes and the clock after each step, and what was chosen; a step takes `seconds(step, bytes)`."""
    now, draw = [0.0], torch.Generator().manual_seed(comm.rank)
    comm.runtime = Runtime(clock=lambda: now[0])
    x = torch.zeros(LENGTH)
    shapes = [Segment("first", 0, (60, 200), (200, 1)), Segment("second", 12_000, (40, 200), (200, 1))]
    r = Replica(x, gradient_buffer(strategy, x), comm, lr=lambda: 0.1, segments=shapes)
    strategy.start(r)
    started = comm.meter.payload_bytes  # LocalSGD sends its start once
    sent, times, chosen = list[float](), list[float](), list[float]()
    for step in range(steps):
        before = comm.meter.payload_bytes
        if strategy.traits.sends_gradients:
            r.g.copy_(torch.randn(LENGTH, generator=draw))
            buckets = [slice(12_000, LENGTH), slice(0, 12_000)]
            for work in [strategy.on_gradient(r, each) for each in buckets]:
                if work is not None:
                    work.wait()
        r.x += torch.randn(LENGTH, generator=draw)
        r.step += 1
        r.metrics.clear()
        strategy.after_step(r)
        chosen += [float(value) for name, value in r.metrics.items() if name not in ("period", "budget_used")]
        now[0] += seconds(step, comm.meter.payload_bytes - before)
        sent.append(comm.meter.payload_bytes - started)
        times.append(now[0])
    return sent, times, chosen


def link(step: int, nbytes: float) -> float:
    """Computation, and a transfer over a link that changes between 20 and 200 Mbit a second."""
    return 0.05 + 8 * nbytes / ((20e6, 200e6, 60e6)[step // 130 % 3])


SPARSE = ErrorFeedback(Gathered(ChunkedTopK()))
BASES_OF_BUDGETS = [
    (LocalSGD(4, codec=CODEC), 30_000),
    (AllReduce(PowerSGD()), 100_000),
    *(
        pytest.param(base, rate, marks=pytest.mark.slow)
        for base, rate in [
            (LocalSGD(1), 900_000),
            (DiLoCo(period=4, fragments=4, delay=2, mixing=0.5, codec=CODEC), 60_000),
            (OverlapLocalSGD(4, codec=CODEC), 60_000),
            (AllReduce(CODEC), 200_000),
            (LocalSGD(4, codec=CODEC), 60_000),
            (LocalSGD(2, codec=SPARSE), 30_000),
            (LocalSGD(2, codec=PowerSGD()), 60_000),
            (SlowMo(period=4, codec=ErrorFeedback(TopK())), 60_000),
            (DiLoCo(period=4, codec=CODEC), 30_000),
            (DiLoCo(period=2, fragments=2, delay=1, mixing=0.5), 600_000),
            (CoCoD(2, codec=Quantize()), 60_000),
            (AllReduce(CODEC), 30_000),
            (AllReduce(Quantize(block=64)), 200_000),
            (AllReduce(ErrorFeedback(RandomK(unbiased=False))), 60_000),
            (AllReduce(SPARSE), 60_000),
        ]
    ),
]


@pytest.mark.parametrize(("base", "rate"), BASES_OF_BUDGETS, ids=str)
@pytest.mark.slow
def test_of_every_hundred_steps_the_budget_is_used_and_not_exceeded_while_the_link_changes(
    base: Strategy, rate: int
) -> None:
    strategy = Budget(base, f"{rate}B/s")
    found = thinwire.run_threads(2, lambda comm: run(comm, strategy, 420, link), timeout=30)
    for sent, times, chosen in found:
        assert chosen == found[0][2]
        for begin in range(50, 320, 30):
            used = (sent[begin + 100] - sent[begin]) / (rate * (times[begin + 100] - times[begin]))
            assert 0.9 <= used <= 1.02, (begin, used)


def test_workers_whose_clocks_differ_decide_alike() -> None:
    def body(comm: Comm) -> list[float]:
        return run(comm, Budget(LocalSGD(4, codec=CODEC), "30kB/s"), 80, lambda *_: 0.05 * (1 + comm.rank))[2]

    first, second = thinwire.run_threads(2, body)
    assert first == second
    assert len(set(first[1:])) <= 3


@pytest.mark.slow
def test_a_budget_per_step_reads_no_clock_and_adds_no_message() -> None:
    def body(comm: Comm) -> tuple[list[float], float]:
        sent, _, bits = run(comm, Budget(LocalSGD(4, codec=CODEC), "1kB/step"), 400, lambda *_: 0.0)
        return bits, sent[-1]

    for bits, sent in thinwire.run_threads(2, body):
        assert set(bits) == {1.0, 2.0}
        assert 0.98 * 400_000 < sent <= 400_000


def test_with_more_than_enough_every_round_has_eight_bits_and_nothing_is_saved_up() -> None:
    def body(comm: Comm) -> Tensor:
        strategy = Budget(LocalSGD(2, codec=CODEC), "1MB/step")
        r = Replica(torch.zeros(LENGTH), torch.empty(0), comm, lr=lambda: 0.1)
        strategy.start(r)
        for _ in range(6):
            r.step += 1
            strategy.after_step(r)
        assert r.metrics["bits"] == 8.0
        return r.state["balance"]

    assert all(balance < 4 * LENGTH / 8 for balance in thinwire.run_threads(2, body))


def replica(comm: Comm, strategy: Strategy) -> Replica:
    x = torch.zeros(LENGTH)
    r = Replica(x, gradient_buffer(strategy, x), comm, lr=lambda: 0.1)
    strategy.start(r)
    return r


def exchange(r: Replica, strategy: Strategy, gradient: Tensor) -> Tensor:
    """The gradient that the optimizer would use."""
    r.g.copy_(gradient)
    works = [strategy.on_gradient(r, each) for each in (slice(LENGTH // 2, LENGTH), slice(0, LENGTH // 2))]
    for work in works:
        if work is not None:
            work.wait()
    r.step += 1
    strategy.after_step(r)
    return r.g.clone()


def test_gradients_that_cannot_be_paid_for_are_sent_later_to_the_last_bit() -> None:
    # Of linear codes of every element, so that nothing is rounded: four steps earn what one message costs.
    strategy = Budget(AllReduce(PowerSGD(4)), f"{LENGTH}B/step")

    def body(comm: Comm) -> list[float]:
        r = replica(comm, strategy)
        found: list[float] = []
        for step in range(9):
            mean = exchange(r, strategy, torch.full((LENGTH,), float(2**step) * (1 + comm.rank)))
            assert (mean == mean[0]).all()
            found.append(mean[0].item())
            assert ("error" in r.state) == (step % 4 != 3)
        assert r.metrics["rank"] == 0.0
        return found

    for found in thinwire.run_threads(2, body):
        assert found == [0, 0, 0, 1.5 * 15, 0, 0, 0, 1.5 * 240, 0]


def test_a_gradient_that_is_kept_and_not_finite_shows_in_the_next_message_of_all_ranks() -> None:
    strategy = Budget(AllReduce(PowerSGD(4)), f"{LENGTH // 2}B/step")

    def body(comm: Comm) -> list[bool]:
        r = replica(comm, strategy)
        values = (torch.inf if comm.rank == 1 and step == 1 else 1.0 for step in range(16))
        return [bool(exchange(r, strategy, torch.full((LENGTH,), value)).isfinite().all()) for value in values]

    for found in thinwire.run_threads(2, body):
        assert [step for step, finite in enumerate(found) if not finite] == [7]


def test_signs_of_gradients_are_chosen_only_where_the_recipe_has_them() -> None:
    def chosen(codec: Codec) -> list[float]:
        strategy = Budget(AllReduce(ErrorFeedback(codec)), "2700B/step")
        return thinwire.run_threads(2, lambda comm: run(comm, strategy, 4, lambda *_: 0.0)[2])[0]

    assert (chosen(Nearest(1)), chosen(Nearest(4))) == ([1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 2.0])


@pytest.mark.parametrize(
    "base",
    [
        LocalSGD(2),
        LocalSGD(2, weights="samples"),
        SlowMo(period=2),
        DiLoCo(period=2),
        DiLoCo(period=2, delay=1, mixing=0.5),
        OverlapLocalSGD(2),
        CoCoD(2),
    ],
    ids=str,
)
def test_a_budget_of_half_the_messages_doubles_the_period(base: Any) -> None:
    def body(comm: Comm) -> list[float]:
        return run(comm, Budget(base, f"{LENGTH + 2}B/step"), 24, lambda *_: 0.0)[0]

    for sent in thinwire.run_threads(2, body):
        steps = [step + 1 for step in range(1, 24) if sent[step] > sent[step - 1]]
        assert len(steps) >= 5
        assert {later - earlier for earlier, later in pairwise(steps)} == {4}


def test_two_vectors_of_one_model_have_one_budget() -> None:
    def body(comm: Comm) -> float:
        model = torch.nn.ModuleList([torch.nn.Linear(64, 64, dtype=each) for each in (torch.float32, torch.float64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thinwire.attach(model, optimizer, Budget(LocalSGD(1, codec=CODEC), "1kB/step"), comm=comm)
        before = comm.meter.payload_bytes
        for _ in range(40):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return comm.meter.payload_bytes - before

    for sent in thinwire.run_threads(2, body):
        assert 0.95 * 40_000 < sent <= 40_000


def test_after_a_switch_a_budget_is_whole_also_while_somebody_keeps_what_was_there_before() -> None:
    strategy = Budget(LocalSGD(3, codec=ErrorFeedback(Nearest(block=8))), "10B/step")

    def train(comm: Comm) -> list[float]:
        model = torch.nn.Linear(8, 4, bias=False)
        worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, comm=comm)
        kept, earned = list(worker.replicas), list[float]()
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            worker.optimizer.step()
            earned.append(float(worker.replicas[0].state["earned"]))
            worker.switch(strategy)
            kept += worker.replicas
        return earned

    assert thinwire.run_threads(2, train) == [[10.0, 20.0]] * 2


def test_means_of_a_base_within_the_base_are_paid_for() -> None:
    def body(comm: Comm) -> tuple[float, float]:
        model = torch.nn.Linear(64, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = Budget(SlowMo(LocalSGD(2), period=4), "800B/step")
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        before = comm.meter.payload_bytes
        for _ in range(48):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return comm.meter.payload_bytes - before, float(worker.replicas[0].state["spent"])

    for sent, spent in thinwire.run_threads(2, body):
        assert sent == spent
        assert 0.7 * 800 * 48 < sent <= 800 * 48


test_wrong_budgets_are_refused_with_the_fix = refusals(
    [
        (lambda: Budget(budget="2MB"), "budget='2MB': must be a number of bytes per second or step. Use 2MB/s"),
        (lambda: Budget(budget="0B/s"), "Use 2MB/s"),
        (lambda: Budget(AllReduce()), r"the size of its messages cannot be changed. Use AllReduce\(\) with a codec"),
        (lambda: Budget(AllReduce(ErrorFeedback(OneBit()))), "the size of its messages cannot be changed"),
        (lambda: Budget(Gossip()), "the size of its messages cannot be changed"),
        (
            lambda: Budget(SlowMo(AllReduce(), period=4)),
            r"sends on its own schedule, .* Use Local\(\) in its place",
        ),
        (lambda: Budget(DiLoCo(NodeAverage(LocalSGD(4), period=2), period=8)), r"Use Local\(\) in its place"),
        (lambda: Budget(SlowMo(period=4, buffers="average")), "Use buffers='maintain' or 'reset'"),
    ]
)
