# SPDX-License-Identifier: Apache-2.0
"""Workers that take different numbers of steps in a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batch, batches, flat, steps
from tests.oracles.paced import unequal_rounds
from tests.problems import Regression
from tests.rules import for_each
from thinwire import (
    AllReduce,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    MismatchError,
    NodeAverage,
    OneBit,
    OuterOptimizer,
    Paced,
    SlowMo,
    Strategy,
    ThinwireError,
)

STEPS, SAMPLES, PERIOD, ROUNDS = (4, 1, 3), (2.0, 5.0, 1.0), 4, 3
BASES: list[tuple[Strategy, float | None]] = [
    (LocalSGD(PERIOD), None),
    (SlowMo(period=PERIOD, momentum=0.6), 0.6),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=1.0, momentum=0.6)), 0.6),
]


def trained(comm: Comm | None, base: Strategy) -> list[float]:
    """Rounds of given numbers of steps."""
    problem = Regression(3, PERIOD * ROUNDS, torch.float64)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    worker = thinwire.attach(model, optimizer, Paced(base, steps=STEPS), comm=comm)
    own = 0
    while worker.step < PERIOD * ROUNDS:
        optimizer.zero_grad()
        problem.loss(model, worker.comm.rank, worker.step).backward()
        worker.record_batch(SAMPLES[worker.comm.rank])
        optimizer.step()
        own += 1
    assert own == STEPS[worker.comm.rank] * ROUNDS
    return flat(model).tolist()


def expected(momentum: float | None) -> Tensor:
    problem = Regression(3, PERIOD * ROUNDS, torch.float64)
    return unequal_rounds(
        problem.gradient,
        problem.start.expand(3, -1),
        rate=0.1,
        period=PERIOD,
        steps=STEPS,
        rounds=ROUNDS,
        samples=SAMPLES,
        momentum=momentum,
    )


@pytest.mark.parametrize(("base", "momentum"), BASES, ids=lambda each: type(each).__name__)
def test_given_steps_and_weights_by_samples_are_the_oracle_on_threads(base: Strategy, momentum: float | None) -> None:
    rows = thinwire.run_threads(3, lambda comm: trained(comm, base), timeout=20)
    torch.testing.assert_close(torch.tensor(rows, dtype=torch.float64), expected(momentum), rtol=1e-10, atol=1e-12)
    assert rows[0] == rows[1] == rows[2]


class Clock:
    """A clock that stands still but for what a test adds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def taken(comm: Comm, seconds: list[float], stall: int | None = None, pause: float = 0.0) -> list[int]:
    """The steps that a rank takes in each of six rounds."""
    clock, counts, model = Clock(), [0], None
    comm.runtime = replace(comm.runtime, clock=clock)
    worker = attach(comm, Paced(LocalSGD(period=12)), model=model)
    while worker.step < 6 * 12:
        before = worker.step
        clock.now += seconds[comm.rank] * (20 if stall == len(counts) and comm.rank == 0 and counts[-1] == 1 else 1)
        clock.now += pause if before % 12 == 0 else 0.0
        x, y = batch(comm.rank, worker.step)
        worker.optimizer.zero_grad()
        (worker.model(x) - y).square().mean().backward()
        worker.optimizer.step()
        counts[-1] += 1
        if worker.step // 12 > before // 12:
            counts.append(0)
    return counts[:-1]


def test_workers_take_as_many_steps_as_their_speeds_allow() -> None:
    rows = thinwire.run_threads(3, lambda comm: taken(comm, [1.0, 1.0, 4.0]), timeout=20)
    assert rows == [[4] + [12] * 5, [4] + [12] * 5, [4] + [3] * 5]


def test_a_stall_ends_the_round_of_the_worker_that_stalls_and_of_no_other() -> None:
    rows = thinwire.run_threads(2, lambda comm: taken(comm, [1.0, 2.0], stall=3), timeout=20)
    assert rows[0] == [4, 12, 2, 12, 12, 12]
    assert rows[1] == [4, 6, 6, 6, 6, 6]


def test_a_pause_between_rounds_is_no_time_of_a_step() -> None:
    rows = thinwire.run_threads(2, lambda comm: taken(comm, [1.0, 4.0], pause=100.0), timeout=20)
    assert rows == [[4] + [12] * 5, [4] + [3] * 5]


def in_bf16(comm: Comm, base: Strategy, gradient: float) -> Tensor:
    """By how much workers move whose parameters are in bf16, in 40 rounds."""
    model = torch.nn.ParameterList([torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    start = flat(model)
    worker = thinwire.attach(model, optimizer, Paced(base, steps=STEPS), comm=comm)
    while worker.step < 40 * PERIOD:
        model[0].grad = torch.full_like(model[0], gradient)
        worker.record_batch(SAMPLES[comm.rank])
        optimizer.step()
    return flat(model).float() - start.float()


@pytest.mark.parametrize(("base", "_"), BASES, ids=lambda each: type(each).__name__)
def test_parameters_in_16_bits_without_gradients_stay_where_they_are(base: Strategy, _: float | None) -> None:
    plain = replace(base, momentum=0.0) if isinstance(base, SlowMo) else base
    for moved in thinwire.run_threads(2, lambda comm: in_bf16(comm, plain, 0.0), timeout=20):
        assert not moved.any()


def test_parameters_in_16_bits_move_by_the_weighted_mean() -> None:
    samples = [steps * each for steps, each in zip(STEPS, SAMPLES, strict=True)]
    should = 40 * 2**-6 * sum(steps * each for steps, each in zip(STEPS, samples, strict=True)) / sum(samples)
    for moved in thinwire.run_threads(3, lambda comm: in_bf16(comm, LocalSGD(PERIOD), -(2**-6)), timeout=20):
        assert moved.mean() == pytest.approx(should, rel=0.02)


@for_each(
    [
        AllReduce(),
        LocalSGD(4, warmup_steps=2),
        LocalSGD(4, weights="samples"),
        LocalSGD(4, codec=ErrorFeedback(OneBit(8))),
        NodeAverage(LocalSGD(4), period=2),
        SlowMo(LocalSGD(3), period=6),
    ]
)
def test_a_base_without_plain_rounds_is_refused(base: Strategy) -> None:
    with pytest.raises(ConfigError, match="must have equal rounds of local steps"):
        Paced(base)


def test_steps_beyond_the_period_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must lie in 1..4"):
        Paced(LocalSGD(4), steps=(4, 5))


def test_join_is_refused() -> None:
    def work(comm: Comm) -> None:
        list(attach(comm, Paced(LocalSGD(4))).join([batch(0, 0)]))

    with pytest.raises(ConfigError, match="workers take different numbers of steps"):
        thinwire.run_threads(2, work, timeout=20)


RULE = r"under Paced workers take different numbers of steps\. .* while worker.step .* multiple of 4"


@pytest.mark.parametrize("call", ["consensus", "save", "switch", "nothing"])
def test_an_ordinary_loop_is_told_the_rule_on_all_ranks(call: str, tmp_path: Path) -> None:
    found: dict[int, ThinwireError] = {}

    def work(comm: Comm) -> None:
        worker = attach(comm, Paced(LocalSGD(4), steps=(4, 1)))
        try:
            steps(worker, batches(comm.rank, 6))
            if call == "consensus":
                with worker.consensus():
                    pass
            if call == "save":
                worker.save(tmp_path)
            if call == "switch":
                worker.switch("AllReduce()")
        except ThinwireError as error:
            found[comm.rank] = error
            raise

    with pytest.raises(ThinwireError, match=RULE):
        thinwire.run_threads(2, work, timeout=3)
    for error in found.values():
        assert "take different numbers of steps" in str(error)
    if call != "nothing":
        assert {type(error) for error in found.values()} == {MismatchError}
        assert len(found) == 2
