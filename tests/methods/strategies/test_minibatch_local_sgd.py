# SPDX-License-Identifier: Apache-2.0
"""Minibatch SGD, Local SGD, and the methods between them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.local_runs import adamw, begin, ended, go_on, sent, sgd
from tests.oracles import minibatch as oracles
from tests.pool import run_processes
from tests.problems import Quadratic, Regression, distance, flat, quadratic, together, train, watched
from thinwire import AllReduce, Codec, Comm, ConfigError, ErrorFeedback, Fp32, LocalSGD, Quantize, SlowMo, Worker
from thinwire.methods.strategies.local.minibatch_local_sgd import MinibatchLocalSGD
from thinwire.planning.plan import explain
from thinwire.worker.worker import internals_of

DOUBLE = torch.float64
STEPS = 14
# A schedule that begins and ends rounds of four with rates of zero, and changes within them.
RATES = [0.0, 0.02, 0.04, 0.06, 0.06, 0.05, 0.0, 0.0, 0.03, 0.03, 0.03, 0.03, 0.02, 0.02]


def expected(n: int, period: int, inner: float) -> Tensor:
    problem = Regression(n, STEPS, DOUBLE)
    return oracles.inner_outer(problem.gradient, problem.start.expand(n, -1), RATES, period=period, inner=inner)


@pytest.mark.parametrize("inner", [0.0, 0.3, 1.0, 1.5])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_rounds_equal_their_oracle_under_any_schedule(n: int, inner: float) -> None:
    real = together(n, MinibatchLocalSGD(4, inner), Regression(n, STEPS, DOUBLE), RATES)
    assert distance(real, expected(n, 4, inner)) < 1e-12


def runs_on_processes() -> list[list[float]]:
    comm = thinwire.GroupComm()
    problem = Regression(comm.size, STEPS, DOUBLE)
    return [
        flat(train(comm, MinibatchLocalSGD(period, inner), problem, RATES).model).tolist()
        for period, inner in [(4, 0.0), (4, 0.3), (7, 1.0)]
    ]


def test_rounds_equal_their_oracle_on_processes() -> None:
    rows = torch.tensor(run_processes(4, runs_on_processes), dtype=DOUBLE)
    for i, (period, inner) in enumerate([(4, 0.0), (4, 0.3), (7, 1.0)]):
        assert distance(rows[:, i], expected(4, period, inner)) < 1e-12


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


def test_with_whole_inner_steps_it_is_local_sgd() -> None:
    problem = Regression(3, STEPS, DOUBLE)
    local = together(3, LocalSGD(4), problem, RATES)
    assert distance(together(3, MinibatchLocalSGD(4, 1.0), problem, RATES), local) < 1e-12
    assert distance(oracles.local(problem.gradient, problem.start.expand(3, -1), RATES, period=4), local) < 1e-12


@pytest.mark.parametrize("inner", [0.0, 0.4, 1.0])
@pytest.mark.slow
def test_rounds_of_one_step_are_all_reduce_and_local_sgd(inner: float) -> None:
    problem = Regression(3, STEPS, DOUBLE)
    for other in (AllReduce(), LocalSGD(1)):
        found = together(3, MinibatchLocalSGD(1, inner), problem, RATES)
        assert distance(found, together(3, other, problem, RATES)) < 1e-13


def test_it_is_slow_momentum_without_momentum() -> None:
    problem, rates = Regression(3, 12, DOUBLE), [0.04] * 12
    slow = together(3, SlowMo(period=4, momentum=0.0, lr=2.5), problem, [0.4 * rate for rate in rates])
    assert distance(together(3, MinibatchLocalSGD(4, 0.4), problem, rates), slow) < 1e-12


def test_one_worker_without_inner_steps_takes_the_step_of_a_large_batch() -> None:
    problem = Regression(1, 12, DOUBLE)
    x, y = (each[:12, 0].reshape(3, 16, -1) for each in problem.batches)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=4 * 0.05)
    for inputs, targets in zip(x, y, strict=True):
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert distance(together(1, MinibatchLocalSGD(4, 0.0), problem, [0.05] * 12), flat(model)[None]) < 1e-12


def test_it_does_not_matter_how_a_minibatch_is_split_among_workers() -> None:
    everything = Regression(1, 16, DOUBLE)

    class Dealt(Regression):
        """The same sixteen batches, four a round, dealt to some workers."""

        def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
            each = 4 // self.size
            return everything.loss(model, 0, step // each * 4 + rank * each + step % each)

    ends = [
        together(n, MinibatchLocalSGD(4 // n, 0.0), Dealt(n, 16, DOUBLE), [0.05 * n] * (16 // n))[:1] for n in (1, 2, 4)
    ]
    assert distance(ends[1], ends[0]) < 1e-13
    assert distance(ends[2], ends[0]) < 1e-13


def test_where_all_workers_see_the_same_whole_inner_steps_are_gradient_descent() -> None:
    problem = Quadratic(torch.full((3,), 0.7, dtype=DOUBLE), torch.ones(3, 3, dtype=DOUBLE) * 2)
    left = together(3, MinibatchLocalSGD(5, 1.0), problem, [0.1] * 20) - 2
    assert distance(left, torch.full_like(left, -((1 - 0.07) ** 20))) < 1e-12


H, C = torch.tensor([1.0, 0.1, 0.5], dtype=DOUBLE), torch.tensor([2.0, -3.0, 1.0], dtype=DOUBLE)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [0.0, 0.5, 1.0])
def test_on_quadratics_rounds_end_at_the_fixed_point_in_closed_form(inner: float) -> None:
    rate, period = 0.1, 6
    problem = Quadratic(H, C[:, None].expand(3, 2))
    weights = (1 - (1 - inner * rate * H) ** period) / inner if inner else rate * period * H
    biased, optimum = (float((w @ C) / w.sum()) for w in (weights, H))
    (found,) = together(3, MinibatchLocalSGD(period, inner), problem, [rate] * 600)[:1]
    assert found.tolist() == pytest.approx([biased] * 2, abs=1e-9)
    assert (abs(biased - optimum) > 0.03) == (inner > 0)


def hard_quadratics(workers: int, width: int) -> tuple[Tensor, Tensor]:
    """Every worker's own curvature of each coordinate, from one to a ten-thousandth at most, and its own optimum."""
    draw = torch.Generator().manual_seed(0)
    spread = torch.rand(workers, width, generator=draw, dtype=DOUBLE)
    return torch.logspace(0, -4, width, dtype=DOUBLE) * spread, torch.randn(
        workers, width, generator=draw, dtype=DOUBLE
    )


@pytest.mark.parametrize("rounds", [20, 100])
def test_where_workers_disagree_accelerated_beats_plain_minibatch_and_that_beats_local(rounds: int) -> None:
    curvatures, centres = hard_quadratics(8, 50)
    whole = curvatures.mean(0)
    optimum = (curvatures * centres).mean(0) / whole
    lipschitz = float(whole.max())

    def gradient(x: Tensor, _: int) -> Tensor:
        return curvatures * (x - centres)

    def gap(x: Tensor) -> float:
        return float(whole @ (x[0] - optimum).square()) / 2

    start = torch.zeros(8, 50, dtype=DOUBLE)
    accelerated = gap(oracles.accelerated(gradient, start, 1 / (2 * lipschitz), rounds)[1])
    minibatch = min(
        gap(oracles.minibatch(gradient, start, [rate / lipschitz] * rounds, period=1)) for rate in (0.5, 1.0, 1.5, 1.9)
    )
    local = min(gap(oracles.local(gradient, start, [2.0**-i] * (16 * rounds), period=16)) for i in range(9))
    assert accelerated < minibatch / 2
    assert minibatch < local


def test_parameter_groups_may_differ_in_their_learning_rates() -> None:
    problem, rates = Regression(3, 8, DOUBLE), RATES[:8]
    for other, inner in ((LocalSGD(4), 1.0), (SlowMo(period=4, momentum=0.0, lr=2.0), 0.5)):
        # The slow step uses a round's mean rate, so only Local SGD is compared under one that changes within a round.
        steady = rates if inner == 1 else [0.03] * 8
        theirs = together(3, other, problem, [inner * rate for rate in steady], factors=(1.0, 0.3))
        ours = together(3, MinibatchLocalSGD(4, inner), problem, steady, factors=(1.0, 0.3))
        assert distance(ours, theirs) < 1e-12


def test_all_workers_hold_the_same_bits_after_each_round() -> None:
    for inner in (0.0, 0.5):
        seen = watched(4, MinibatchLocalSGD(3, inner), Regression(4, 9, torch.float32), [0.05] * 9)
        assert all(torch.equal(seen[step], seen[step, :1].expand_as(seen[step])) for step in (2, 5, 8))
        assert torch.equal(seen[3], seen[3, :1].expand_as(seen[3])) == (inner == 0)


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


def test_a_round_is_one_message_of_the_parameters_size() -> None:
    for inner in (0.0, 0.5):
        found = sent(4, MinibatchLocalSGD(4, inner), Regression(4, 8, torch.float32), 8, sgd(0.05, 0.0))
        assert found == [(2 * 2 * 3 / 4 * 4 * 34, 2)] * 4
        card = explain(MinibatchLocalSGD(4, inner), parameters=1000, workers=4)
        assert card.sent_bytes_per_step == pytest.approx(2 * 3 / 4 * 4000 / 4)
        assert card.period == 4


@pytest.mark.parametrize("inner", [0.0, 0.5])
def test_consensus_within_a_round_is_the_mean_and_disturbs_nothing(inner: float) -> None:
    problem = Regression(3, 6, DOUBLE)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = go_on(begin(comm, MinibatchLocalSGD(4, inner), problem, sgd(0.05, 0.0)), problem, range(6))
        own = flat(worker.model)
        with worker.consensus() as model:
            agreed = flat(model)
        return own, agreed, flat(worker.model)

    own, agreed, after = (torch.stack(each) for each in zip(*thinwire.run_threads(3, body), strict=True))
    assert distance(agreed, own.mean(0).expand_as(own)) < 1e-14
    assert torch.equal(after, own)


@pytest.mark.parametrize("inner", [0.0, 0.5])
@pytest.mark.parametrize("stop", [4, 6])
def test_it_resumes_bit_for_bit(inner: float, stop: int) -> None:
    problem = Regression(3, STEPS, torch.float32)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        strategy = MinibatchLocalSGD(4, inner)
        one = go_on(begin(comm, strategy, problem, sgd(0.05, 0.0)), problem, range(stop))
        saved = one.state_dict(model=True, optimizer=True)
        go_on(one, problem, range(stop, STEPS))
        two = begin(comm, strategy, problem, sgd(0.05, 0.0))
        two.load_state_dict(saved)
        return flat(one.model), flat(go_on(two, problem, range(stop, STEPS)).model)

    assert all(torch.equal(one, two) for one, two in thinwire.run_threads(3, body))


def test_gradients_are_averaged_over_the_workers_that_still_have_data() -> None:
    problem, lengths = Regression(3, 8, DOUBLE), [8, 5, 2]

    def body(comm: Comm) -> Tensor:
        worker = begin(comm, MinibatchLocalSGD(4, 0.5), problem, sgd(0.05, 0.0))
        for step in worker.join(range(lengths[comm.rank])):
            go_on(worker, problem, range(step, step + 1))
        return flat(worker.model)

    def gradient(x: Tensor, step: int) -> Tensor:
        return torch.tensor([[float(step < length)] for length in lengths], dtype=DOUBLE) * problem.gradient(x, step)

    active = [sum(step < length for length in lengths) for step in range(8)]
    start = problem.start.expand(3, -1)
    wanted = oracles.inner_outer(gradient, start, [0.05] * 8, period=4, inner=0.5, active=active)
    assert distance(torch.stack(thinwire.run_threads(3, body)), wanted) < 1e-12


def test_an_exact_average_from_outside_ends_the_round() -> None:
    problem, rates = Regression(3, 12, DOUBLE), [0.04] * 12
    around = SlowMo(MinibatchLocalSGD(8, 0.5), period=4, momentum=0.0)
    assert distance(together(3, around, problem, rates), together(3, MinibatchLocalSGD(4, 0.5), problem, rates)) < 1e-12
    aligned = SlowMo(MinibatchLocalSGD(4, 0.5), period=4, momentum=0.0)
    assert torch.equal(together(3, aligned, problem, rates), together(3, MinibatchLocalSGD(4, 0.5), problem, rates))


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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MinibatchLocalSGD(0), "period=0: must be at least 1"),
        (
            lambda: MinibatchLocalSGD(inner=-0.1),
            "inner=-0.1: must be finite and not negative. 0 is minibatch, 1 is Local SGD",
        ),
        (lambda: MinibatchLocalSGD(inner=float("inf")), "must be finite"),
        (lambda: MinibatchLocalSGD(period=2.5), "period must be a whole number"),  # type: ignore[arg-type]
    ],
)
def test_rounds_that_cannot_work_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (adamw(), r"AdamW under MinibatchLocalSGD.*: its step is not a multiple of the gradient. Use LocalSGD\(\)"),
        (sgd(0.1, 0.9), r"SGD\(momentum=0.9\) under MinibatchLocalSGD.*SlowMo\(momentum=...\)"),
        (sgd(0.1, 0.0, weight_decay=0.01), r"SGD\(weight_decay=0.01\).*Add it to the loss"),
        (sgd(0.1, 0.0, maximize=True), r"SGD\(maximize=True\).*Change the sign of the loss"),
    ],
)
def test_optimizers_that_are_not_plain_sgd_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        begin(None, MinibatchLocalSGD(), Regression(1, 1, DOUBLE), make)
