# SPDX-License-Identifier: Apache-2.0
"""A budget of bytes: what is sent stays within it and uses it, alike on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.problems import Regression, quadratic, together
from thinwire import (
    AllReduce,
    BetweenNodes,
    Budget,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    Gathered,
    LocalSGD,
    Nearest,
    Replica,
    SlowMo,
    Strategy,
    TopK,
)
from thinwire.comm.runtime import Runtime

CODEC = ErrorFeedback(Nearest(4, 64))
LENGTH = 20_000


def run(comm: Comm, strategy: Strategy, steps: int, seconds: Any) -> tuple[list[float], list[float], list[float]]:
    """Bytes and the clock after each step, and the bits of each round; a step takes `seconds(step, bytes)`."""
    now, draw = [0.0], torch.Generator().manual_seed(comm.rank)
    comm.runtime = Runtime(clock=lambda: now[0])
    r = Replica(torch.zeros(LENGTH), torch.empty(0), comm, lr=lambda: 0.1)
    strategy.start(r)
    started = comm.meter.payload_bytes  # LocalSGD sends its start once
    sent, times, bits = list[float](), list[float](), list[float]()
    for step in range(steps):
        before = comm.meter.payload_bytes
        r.x += torch.randn(LENGTH, generator=draw)
        r.step += 1
        r.metrics.pop("bits", None)
        strategy.after_step(r)
        if "bits" in r.metrics:
            bits.append(float(r.metrics["bits"]))
        now[0] += seconds(step, comm.meter.payload_bytes - before)
        sent.append(comm.meter.payload_bytes - started)
        times.append(now[0])
    return sent, times, bits


def link(step: int, nbytes: float) -> float:
    """Computation, and a transfer over a link that changes between 20 and 200 Mbit a second."""
    return 0.05 + 8 * nbytes / ((20e6, 200e6, 60e6)[step // 130 % 3])


@pytest.mark.parametrize("rate", [30_000, 60_000])
@pytest.mark.parametrize("base", [LocalSGD(4, codec=CODEC), DiLoCo(period=4, codec=CODEC)], ids=str)
def test_of_every_hundred_steps_the_budget_is_used_and_not_exceeded_while_the_link_changes(
    base: Strategy, rate: int
) -> None:
    strategy = Budget(base, f"{rate}B/s")
    found = thinwire.run_threads(2, lambda comm: run(comm, strategy, 600, link), timeout=30)
    for sent, times, bits in found:
        assert bits == found[0][2]
        for begin in range(100, 500, 50):
            used = (sent[begin + 100] - sent[begin]) / (rate * (times[begin + 100] - times[begin]))
            assert 0.9 <= used <= 1.02, (begin, used)


def test_workers_whose_clocks_differ_decide_alike() -> None:
    def body(comm: Comm) -> list[float]:
        return run(comm, Budget(LocalSGD(4, codec=CODEC), "30kB/s"), 80, lambda *_: 0.05 * (1 + comm.rank))[2]

    first, second = thinwire.run_threads(2, body)
    assert first == second
    assert len(set(first[1:])) <= 3


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


@pytest.mark.parametrize(
    "base",
    [LocalSGD(2, codec=CODEC), SlowMo(period=2, codec=CODEC), LocalSGD(2, codec=BetweenNodes(CODEC, 1))],
    ids=str,
)
def test_eight_bits_train_as_the_base_in_eight_bits(base: Any) -> None:
    problem = Regression(2, 8, torch.float32)
    found = together(2, Budget(base, "1MB/step"), problem, [0.1] * 8)
    wide = LocalSGD(2, codec=ErrorFeedback(Nearest(8, 64)))
    if isinstance(base, SlowMo):
        wide = SlowMo(period=2, codec=ErrorFeedback(Nearest(8, 64)))
    assert torch.equal(found, together(2, wide, problem, [0.1] * 8))


def test_rounds_that_cannot_be_paid_for_go_on_and_training_converges() -> None:
    problem = quadratic(3, torch.float32, width=2000)
    rates = [0.3 * 0.95**k for k in range(80)]
    codec = ErrorFeedback(Gathered(Nearest(4, 64)))
    found, plain = (
        together(3, strategy, problem, rates)
        for strategy in (Budget(LocalSGD(2, codec=codec), "600B/step"), LocalSGD(2))
    )
    assert (found.mean(0) - plain[0]).norm() < 0.3 * (problem.start - plain[0]).norm()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Budget(budget="2MB"), "budget='2MB': a number of bytes per second or step; such as 2MB/s"),
        (lambda: Budget(budget="0B/s"), "such as 2MB/s"),
        (lambda: Budget(LocalSGD(8)), "there are no bits"),
        (lambda: Budget(LocalSGD(8, codec=ErrorFeedback(TopK()))), "there are no bits"),
        (lambda: Budget(DiLoCo(period=4, codec=CODEC, delay=1)), "DiLoCo.. without fragments"),
        (lambda: Budget(AllReduce(CODEC)), "there are no bits"),
    ],
)
def test_wrong_budgets_are_refused_with_the_fix(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
