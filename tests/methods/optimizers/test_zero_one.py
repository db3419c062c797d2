# SPDX-License-Identifier: Apache-2.0
"""0/1 Adam: its oracle, its steps, and the guarantees of its stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import net
from tests.methods.optimizers.one_bit_runs import SIZES, begun, kept, parameters_of, stepped, taken
from tests.oracles import one_bit as oracles
from tests.problems import Regression, distance, flat
from tests.rules import refusals
from thinwire import AllReduce, Comm, Strategy, Worker
from thinwire.errors import ConfigError
from thinwire.methods.codecs.one_bit import OneBit
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.methods.strategies.gradients.one_bit import CompressedMomentum
from thinwire.methods.strategies.gradients.zero_one import ZeroOne
from thinwire.planning.plan import explain
from thinwire.worker.worker import internals_of

# Gradients are averaged at 0, 1, 2, 4, 6 and 8; synchronisations are after steps 3, 5, 7, 9 and 10, 11, 12, then every
# second one three times, then every fourth.
SCHEDULE = ZeroOne(OneBit(block=8), variance_steps=10, variance_doubling=2, local_doubling=3, most_local=4)
AVERAGES = frozenset({0, 1, 2, 4, 6})
SYNCHRONISES = frozenset({3, 5, 7, 8, 9, 10, 11, 12, 14, 16, 18, 22, 26, 30, 34})
STEPS = 36


def rates(steps: int = STEPS) -> list[float]:
    return [0.03 / (1 + step / 10) for step in range(steps)]


def trained(
    comm: Comm | None, problem: Regression, decay: float, first: int = 0, last: int = STEPS, strategy: Any = SCHEDULE
) -> tuple[Worker, Tensor]:
    """The run with its falling learning rate, and the parameters after every step."""
    worker = begun(comm, strategy, problem.model(), ZeroOneAdam, weight_decay=decay)
    return worker, gone(worker, problem, first, last)


def gone(worker: Worker, problem: Regression, first: int, last: int) -> Tensor:
    seen: list[Tensor] = []
    for step in range(first, last):
        worker.optimizer.param_groups[0]["lr"] = rates()[step]
        seen += taken(worker, problem, step, step + 1)
    return torch.stack(seen)


def expected(problem: Regression, size: int, decay: float) -> Tensor:
    hyperparameters = oracles.Hyperparameters(decay=decay)
    code = oracles.signs(8)
    run = oracles.ZeroOne(SIZES, hyperparameters, AVERAGES, SYNCHRONISES, oracles.TwoStages(code, code), rates())
    return run.run(problem.gradient, problem.start.expand(size, -1))


def test_gaps_double_as_configured() -> None:
    assert {step for step in range(STEPS) if SCHEDULE.averages_gradients(step)} == AVERAGES
    assert {step for step in range(STEPS) if SCHEDULE.synchronises(step)} == AVERAGES | SYNCHRONISES
    usual = ZeroOne()
    gaps = [step for step in range(1000) if usual.averages_gradients(step)]
    assert gaps[:18] == [*range(16), 16, 18]
    assert gaps[32:34] == [48, 52]
    assert all(usual.synchronises(step) for step in range(2000))
    assert not usual.synchronises(2000) and usual.synchronises(2001)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_equals_its_oracle(size: int, decay: float) -> None:
    problem = Regression(size, STEPS, torch.float64)

    def body(comm: Comm) -> Tensor:
        worker, path = trained(comm, problem, decay)
        worker.detach()
        return path

    found = torch.stack(thinwire.run_threads(size, body, timeout=20), dim=1)
    assert distance(found, expected(problem, size, decay)) < 2e-6
    for step in AVERAGES | SYNCHRONISES:
        assert all(torch.equal(found[step, 0], found[step, rank]) for rank in range(size))
    if size > 1:
        assert not torch.equal(found[13, 0], found[13, 1]), "workers must have taken local steps"


@pytest.mark.parametrize(
    ("ours", "theirs", "dtype"),
    [
        # Gradients at every step: Adam without corrections.
        (ZeroOne(variance_steps=20, variance_doubling=20), AllReduce(), torch.float32),
        # A warm-up, and no local step.
        (
            ZeroOne(OneBit(block=8), variance_steps=8, variance_doubling=8, most_local=1),
            CompressedMomentum(OneBit(block=8), warmup_steps=8),
            torch.float64,
        ),
    ],
    ids=str,
)
def test_at_the_ends_of_its_settings_it_is_adam_or_one_bit_adam_bit_for_bit(
    ours: Strategy, theirs: Strategy, dtype: torch.dtype
) -> None:
    problem = Regression(2, 20, dtype)

    def body(comm: Comm, strategy: Any, kind: Any) -> Tensor:
        worker = begun(comm, strategy, problem.model(), kind, lr=0.03, weight_decay=0.1)
        path = torch.stack(taken(worker, problem, 0, 20))
        worker.detach()
        return path

    found = thinwire.run_threads(2, lambda comm: body(comm, ours, ZeroOneAdam))
    known = thinwire.run_threads(2, lambda comm: body(comm, theirs, OneBitAdam))
    assert torch.equal(found[0], known[0])


@pytest.mark.parametrize("step", [11, 16], ids=["after another", "after local steps"])
def test_a_gradient_that_is_not_finite_makes_all_skip_a_synchronisation(step: int) -> None:
    problem = Regression(2, STEPS, torch.float32)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker, _ = trained(comm, problem, 0.0, 0, step)
        internals_of(worker).nonfinite = "skip"
        residual = worker.replicas[0].state["error"].clone()
        before = parameters_of(worker).clone()
        stepped(worker.optimizer, problem.loss(worker.model, comm.rank, step) * (float("nan") if comm.rank else 1.0))
        assert torch.equal(worker.replicas[0].state["error"], residual)
        skipped = parameters_of(worker).clone()
        gone(worker, problem, step + 1, STEPS - 1)
        worker.detach()
        return before, skipped, flat(worker.model)

    found = thinwire.run_threads(2, body, timeout=20)
    for before, skipped, after in found:
        assert torch.equal(before, skipped)
        assert after.isfinite().all()
    assert torch.equal(found[0][2], found[1][2])


def test_a_gradient_that_is_not_finite_counts_as_zero_in_a_local_step() -> None:
    problem = Regression(2, STEPS, torch.float32)

    def body(comm: Comm, factor: float) -> Tensor:
        worker, _ = trained(comm, problem, 0.0, 0, 13)
        internals_of(worker).nonfinite = "skip"
        stepped(worker.optimizer, problem.loss(worker.model, comm.rank, 13) * (factor if comm.rank else 1.0))
        path = gone(worker, problem, 14, 20)
        worker.detach()
        return path[-1]

    bad, none = (thinwire.run_threads(2, lambda comm, f=factor: body(comm, f)) for factor in (float("inf"), 0.0))
    assert torch.equal(bad[1], none[1]) and bad[0].isfinite().all()


def test_weight_decay_is_not_part_of_momenta() -> None:
    problem = Regression(1, STEPS, torch.float64)

    def body(comm: Comm) -> Tensor:
        model = problem.model()
        worker = begun(comm, SCHEDULE, model, ZeroOneAdam, lr=0.01, weight_decay=0.5)
        for _ in range(20):
            stepped(worker.optimizer, torch.stack([(p * 0.0).sum() for p in model.parameters()]).sum())
        assert not kept(worker, "momentum").any()
        worker.detach()
        return flat(model)

    (found,) = thinwire.run_threads(1, body)
    assert distance(found, problem.start * (1 - 0.01 * 0.5) ** 20) < 1e-12


def test_nothing_is_sent_in_a_local_step() -> None:
    problem = Regression(2, STEPS, torch.float32)

    def body(comm: Comm) -> list[float]:
        worker = begun(comm, SCHEDULE, problem.model(), ZeroOneAdam, lr=0.01)
        sent: list[float] = []
        for step in range(STEPS):
            before = comm.meter.payload_bytes
            taken(worker, problem, step, step + 1)
            sent.append(comm.meter.payload_bytes - before)
        worker.detach()
        return sent

    sent = thinwire.run_threads(2, body)[0]
    assert {step for step, nbytes in enumerate(sent) if not nbytes} == set(range(STEPS)) - AVERAGES - SYNCHRONISES
    assert {sent[step] for step in AVERAGES} == {34 * 4.0}
    assert len({sent[step] for step in SYNCHRONISES}) == 1


def test_a_dry_run_counts_its_bytes() -> None:
    card, every = (explain(ZeroOne(most_local=most), workers=4, parameters=1 << 16) for most in (8, 1))
    assert card.period == 8
    assert card.sent_bytes_per_step == every.sent_bytes_per_step / 8
    assert every.all_reduce_bytes_per_step > 30 * every.sent_bytes_per_step


test_schedules_that_cannot_be_are_refused = refusals(
    [
        ({"variance_steps": 0}, "at least 1"),
        ({"variance_doubling": 0}, "at least 1"),
        ({"local_doubling": 0}, "at least 1"),
        ({"most_local": 3}, "power of two"),
        ({"most_local": 0}, "power of two"),
    ],
    lambda settings: ZeroOne(**settings),
)


def test_other_optimizers_are_refused() -> None:
    model = net()
    with pytest.raises(ConfigError, match="Use ZeroOneAdam"):
        thinwire.attach(model, torch.optim.Adam(model.parameters()), ZeroOne())
