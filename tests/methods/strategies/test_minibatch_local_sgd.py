# SPDX-License-Identifier: Apache-2.0
"""Minibatch SGD, Local SGD, and the methods between them: oracle, sums in 16 bits, bytes, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.local_runs import adamw, begin, ended, go_on, sgd
from tests.oracles.common import Descent, Gradient
from tests.oracles.machines import TwoRates, path
from tests.problems import Regression, distance, flat, quadratic, together
from tests.rules import refusals
from thinwire import AllReduce, Codec, Comm, ErrorFeedback, Fp32, Quantize, Worker
from thinwire.methods.strategies.local.minibatch_local_sgd import MinibatchLocalSGD
from thinwire.worker.worker import internals_of

DOUBLE = torch.float64
STEPS = 14
# A schedule that begins and ends rounds of four with rates of zero, and changes within them.
RATES = [0.0, 0.02, 0.04, 0.06, 0.06, 0.05, 0.0, 0.0, 0.03, 0.03, 0.03, 0.03, 0.02, 0.02]


def expected(problem: Regression, inner: float, gradient: Gradient, rates: Sequence[float]) -> Tensor:
    return path(TwoRates(4, inner=inner), gradient, problem.start.expand(problem.size, -1), Descent(rates), rates)[-1]


@pytest.mark.parametrize("inner", [0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_rounds_equal_their_oracle_under_any_schedule(n: int, inner: float) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    real = together(n, MinibatchLocalSGD(4, inner), problem, RATES)
    assert distance(real, expected(problem, inner, problem.gradient, RATES)) < 1e-12


def accumulated(comm: Comm, problem: Regression, period: int, lr: float) -> Tensor:
    """Gradient accumulation under `AllReduce`."""
    worker = begin(comm, AllReduce(), problem, sgd(lr, 0.0))
    for first in range(0, STEPS - STEPS % period, period):
        worker.optimizer.zero_grad()
        with worker.no_sync():
            for step in range(first, first + period - 1):
                problem.loss(worker.model, comm.rank, step).backward()
        problem.loss(worker.model, comm.rank, first + period - 1).backward()
        worker.optimizer.step()
    return flat(worker.model)


@pytest.mark.parametrize("n", [1, 3])
def test_without_inner_steps_it_is_accumulated_gradients_bit_for_bit(n: int) -> None:
    problem = Regression(n, STEPS, torch.float32)
    theirs = torch.stack(thinwire.run_threads(n, lambda comm: accumulated(comm, problem, 3, 0.07)))
    ours = ended(n, MinibatchLocalSGD(3, 0.0), problem, 12, sgd(0.07, 0.0))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("rates", "codec"),
    fast_where(
        lambda each: each in (([2**-10, 2**-9], None), ([2**-10, 2**-10], Quantize(8))),
        product(([2**-10, 2**-10], [2**-10, 2**-9]), (None, ErrorFeedback(Fp32()), Quantize(8))),
    ),
    ids=str,
)
def test_a_long_sum_of_gradients_in_16_bits_loses_none(rates: list[float], codec: Codec | None) -> None:
    def body(comm: Comm) -> tuple[Tensor, float, torch.dtype]:
        model = nn.ParameterList([torch.zeros(2, dtype=torch.bfloat16) for _ in rates])
        groups = [{"params": [each], "lr": rate} for each, rate in zip(model, rates, strict=True)]
        worker = thinwire.attach(model, torch.optim.SGD(groups), MinibatchLocalSGD(512, 0.0, codec), comm=comm)
        before = comm.meter.payload_bytes
        for _ in range(512):
            for each in model:
                each.grad = torch.full_like(each, 1.3)
            worker.optimizer.step()
        return flat(model).double(), comm.meter.payload_bytes - before, worker.replicas[0].state["gathered"].dtype

    for x, nbytes, dtype in thinwire.run_threads(2, body):
        should = -1.3 * 512 * torch.tensor(rates, dtype=DOUBLE).repeat_interleave(2)
        torch.testing.assert_close(x, should, rtol=1e-2, atol=0)
        assert dtype == torch.float32
        assert codec is not None or nbytes == 2 * 4  # bytes of each parameter


def test_gradients_are_averaged_over_the_workers_that_still_have_data() -> None:
    problem, lengths = Regression(3, 8, DOUBLE), [8, 5, 2]

    def body(comm: Comm) -> Tensor:
        worker = begin(comm, MinibatchLocalSGD(4, 0.5), problem, sgd(0.05, 0.0))
        for step in worker.join(range(lengths[comm.rank])):
            go_on(worker, problem, range(step, step + 1))
        return flat(worker.model)

    def gradient(x: Tensor, step: int) -> Tensor:
        return torch.tensor([[float(step < length)] for length in lengths], dtype=DOUBLE) * problem.gradient(x, step)

    wanted = expected(problem, 0.5, gradient, [0.05] * 8)
    assert distance(torch.stack(thinwire.run_threads(3, body)), wanted) < 1e-12


def test_gradients_without_a_number_reach_all_workers_at_the_end_of_the_round() -> None:
    problem = quadratic(2, DOUBLE)

    def spoil(worker: Worker, step: int) -> None:
        internals_of(worker).nonfinite = "ignore"
        if step == 1 and worker.comm.rank == 0:
            next(worker.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]

    def after(steps: int) -> Tensor:
        return ended(2, MinibatchLocalSGD(4, 0.0), problem, steps, sgd(0.1, 0.0), before_step=spoil)

    assert bool(after(3).isfinite().all())
    assert bool(after(4)[:, 0].isnan().all())


test_rounds_that_cannot_work_are_refused = refusals(
    [
        (lambda: MinibatchLocalSGD(0), "period=0: must be at least 1"),
        (
            lambda: MinibatchLocalSGD(inner=-0.1),
            "inner=-0.1: must be finite and not negative. 0 is minibatch, 1 is Local SGD",
        ),
        (lambda: MinibatchLocalSGD(inner=float("inf")), "must be finite"),
        (lambda: MinibatchLocalSGD(period=2.5), "period must be a whole number"),  # type: ignore[arg-type]
    ]
)


test_optimizers_that_are_not_plain_sgd_are_refused = refusals(
    [
        (adamw(), r"AdamW under MinibatchLocalSGD.*: its step is not a multiple of the gradient. Use LocalSGD\(\)"),
        (sgd(0.1, 0.9), r"SGD\(momentum=0.9\) under MinibatchLocalSGD.*SlowMo\(momentum=...\)"),
        (sgd(0.1, 0.0, weight_decay=0.01), r"SGD\(weight_decay=0.01\).*Add it to the loss"),
        (sgd(0.1, 0.0, maximize=True), r"SGD\(maximize=True\).*Change the sign of the loss"),
    ],
    lambda make: begin(None, MinibatchLocalSGD(), Regression(1, 1, DOUBLE), make),
)
