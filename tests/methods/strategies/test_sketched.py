# SPDX-License-Identifier: Apache-2.0
"""Sparse updates: Sketched SGD, local top-k and FetchSGD."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests import engine
from tests.oracles.sketched import Sketched
from tests.pretend_gpu import GPU, pretend_gpu
from tests.problems import Quadratic, Regression, distance, flat, train, watched
from tests.rules import refusals
from thinwire import Comm, ConfigError, NonFiniteError, Replica, Strategy, Worker
from thinwire.core.comm.counting import CountingComm
from thinwire.core.kernels import sketch_
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.strategies.gradients.fetch import FetchSGD
from thinwire.methods.strategies.gradients.sketched import SketchedSGD
from thinwire.methods.strategies.gradients.sketches import largest_of
from thinwire.planning.plan.traffic import DryRun

RATES = [0.1, 0.08, 0.12, 0.05, 0.1, 0.1, 0.03, 0.06, 0.1, 0.1, 0.02, 0.1]
SMALL = [*range(20, 24), *range(32, 34)]  # the tensors of four and of two elements of the perceptron


def matrix(n: int, rows: int, columns: int, key: int) -> Tensor:
    """The sketch as a matrix, one column for each element, found out by sketching every unit vector."""
    found = torch.zeros(rows, columns, n)
    for i in range(n):
        table, unit = torch.zeros(rows, columns), torch.zeros(n)
        unit[i] = 1.0
        sketch_(unit, table, key=key)
        found[:, :, i] = table
    return found


def of_step(n: int, rows: int, columns: int) -> Callable[[int], Tensor]:
    return lambda t: matrix(n, rows, columns, draw_key(0, t))


def oracle(strategy: SketchedSGD, n: int, size: int, *, small: list[int], gathers: bool = False) -> Sketched:
    loud = n - len(small)
    k = max(1, round(strategy.fraction * loud))
    return Sketched(
        k,
        strategy.second_round * k,
        strategy.momentum,
        None if gathers else of_step(loud, strategy.rows, strategy.columns * k),
        small,
        strategy.masking,
        strategy.lr_in_residual,
    )


SKETCH = partial(SketchedSGD, fraction=0.2, columns=2, recovery="sketch", dense_below=0)
CASES: list[tuple[SketchedSGD, list[int]]] = [
    (SKETCH(), []),
    (SKETCH(momentum=0.0, rows=1), []),
    (SKETCH(second_round=0), []),
    (SKETCH(second_round=1), []),
    (SKETCH(masking=False), []),
    (SKETCH(lr_in_residual=False), []),
    (SKETCH(dense_below=5), SMALL),
    (SketchedSGD(0.2, recovery="gather", dense_below=0), []),
    (SketchedSGD(0.2, recovery="gather", dense_below=5, lr_in_residual=False), SMALL),
]


@pytest.mark.parametrize(("strategy", "small"), CASES, ids=[str(s) for s, _ in CASES])
@pytest.mark.parametrize("size", [1, 3])
def test_every_form_equals_its_oracle_on_threads(strategy: SketchedSGD, small: list[int], size: int) -> None:
    problem = Regression(size, 12, torch.float32)
    gathers = strategy.recovery == "gather"
    second = oracle(strategy, 34, size, small=small, gathers=gathers)
    wanted = second.run(problem.gradient, problem.start.expand(size, -1), RATES, decay=0.02)
    both = watched(
        size, strategy, problem, RATES, lambda r: torch.cat([r.x, unsent_and_momentum(r)]), weight_decay=0.02
    )
    seen, state = both[..., :34], both[-1, :, 34:]
    assert torch.equal(seen, seen[:, :1].expand_as(seen))
    assert distance(seen, wanted[:, None].expand_as(seen)) < 2e-5
    assert torch.allclose(state, torch.cat([second.v, second.u], 1), rtol=0, atol=2e-6)


def unsent_and_momentum(r: Replica) -> Tensor:
    return torch.cat([r.state["unsent"], r.state["momentum"]])


# -- updates and residuals ---------------------------------------------------------------------------------------------


class Whole(Quadratic):
    """Gradients that are whole numbers, and known beforehand."""

    def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * step + rank)
        return (model() * torch.randint(-9, 10, (len(self.start),), generator=draw)).sum()


def whole_gradients(steps: int, size: int, n: int) -> Tensor:
    rows = [
        torch.randint(-9, 10, (n,), generator=torch.Generator().manual_seed(100 * t + w)).float()
        for t in range(steps)
        for w in range(size)
    ]
    return torch.stack(rows).view(steps, size, n)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("recovery", ["sketch", "gather"])
def test_updates_and_residuals_add_up_to_all_momenta_bitwise(recovery: Any, momentum: float) -> None:
    n, size, steps = 40, 4, 10
    strategy = SketchedSGD(
        0.1, 4, momentum=momentum, masking=False, lr_in_residual=False, dense_below=0, recovery=recovery
    )
    problem = Whole(torch.ones(size), torch.zeros(size, n))
    seen = watched(size, strategy, problem, [1.0] * steps, lambda r: torch.cat([r.x, r.state["unsent"]]))
    moved, unsent = problem.start - seen[-1, 0, :n], seen[-1, :, n:].sum(0)
    total, u = torch.zeros(n), torch.zeros(size, n)
    for g in whole_gradients(steps, size, n):
        u = momentum * u + g / size
        total += u.sum(0)
    assert torch.equal(moved + unsent, total)
    assert unsent.abs().max() > 0


def test_chosen_positions_whose_sum_is_zero_are_cleared_too() -> None:
    class Opposed(Quadratic):
        def loss(self, model: nn.Module, rank: int, step: int) -> Tensor:
            return (model() * torch.tensor([1.0, -1.0])[rank]).sum()

    strategy = SketchedSGD(1.0, 1, momentum=0.5, dense_below=0, recovery="sketch", lr_in_residual=False)
    seen = watched(2, strategy, Opposed(torch.ones(2), torch.zeros(2, 6)), [1.0] * 2, unsent_and_momentum)
    assert torch.equal(seen, torch.zeros_like(seen))


def test_a_parameter_without_learning_rate_stays_and_so_does_its_residual() -> None:
    problem = Regression(2, 6, torch.float32)
    for strategy in (SKETCH(fraction=1.0), SKETCH(fraction=1.0, lr_in_residual=False), FetchSGD(1.0, conserving=True)):
        seen = watched(2, strategy, problem, [0.1] * 6, factors=[1.0, 0.0])
        assert torch.equal(seen[-1, 0, 20:24], problem.start[20:24])
        assert not torch.equal(seen[-1, 0, :20], problem.start[:20])
        assert seen.isfinite().all()


def test_half_precision_keeps_residuals_in_single() -> None:
    def body(comm: Comm) -> tuple[torch.dtype, Tensor]:
        worker = engine.attach(comm, SKETCH(), model=engine.net().bfloat16(), optimizer=plain)
        batches = [(x.bfloat16(), y.bfloat16()) for x, y in engine.batches(comm.rank, 4)]
        engine.steps(worker, batches).detach()
        return worker.replicas[0].state["unsent"].dtype, flat(worker.model)

    (dtype, first), (_, second) = thinwire.run_threads(2, body)
    assert dtype == torch.float32
    assert torch.equal(first, second)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)


# -- faults, saving, other sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize(
    "strategy", [SKETCH(), SKETCH(recovery="gather"), FetchSGD(0.2), FetchSGD(0.2, conserving=True)]
)
def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_skip_the_step(strategy: Strategy, bad: float) -> None:
    def body(comm: Comm) -> tuple[bool, bool, Tensor, float]:
        worker = engine.attach(comm, strategy, optimizer=plain, nonfinite="skip")
        for group in worker.optimizer.param_groups:
            group["weight_decay"] = 0.0
        engine.steps(worker, engine.batches(comm.rank, 3))
        (r,) = worker.replicas
        before, x = {name: y.clone() for name, y in r.state.items()}, r.x.clone()
        data = engine.batch(comm.rank, 3)
        engine.steps(worker, [(data[0] * (bad if comm.rank == 1 else 1.0), data[1])])
        same = all(torch.equal(r.state[name], y) for name, y in before.items())
        stays = torch.equal(r.x, x)
        skipped = worker.metrics()["skipped_steps"]
        engine.steps(worker, engine.batches(comm.rank, 3, first=4)).detach()
        return same, stays, flat(worker.model), skipped

    for same, stays, x, skipped in thinwire.run_threads(3, body):
        assert same
        assert stays
        assert x.isfinite().all()
        assert skipped == 1.0


def test_another_number_of_workers_has_the_same_residual_in_total() -> None:
    draw = torch.Generator().manual_seed(0)
    states = [
        {name: torch.randn(9, generator=draw) for name in ("momentum", "unsent")} | {"error_sketch": torch.ones(2, 3)}
        for _ in range(4)
    ]
    for size in (1, 3, 8):
        found = SketchedSGD().resized(states, size)
        assert len(found) == size
        for name in ("momentum", "unsent"):
            before, after = (sum(state[name].double() for state in each) for each in (states, found))
            assert torch.allclose(torch.as_tensor(before), torch.as_tensor(after), rtol=0, atol=1e-6)
        assert torch.equal(found[-1]["error_sketch"], torch.ones(2, 3))


# -- bytes -------------------------------------------------------------------------------------------------------------


def sent(comm: Comm, strategy: Strategy, steps: int) -> float:
    before = [0.0]

    def after(worker: Worker) -> None:
        before.append(worker.comm.meter.payload_bytes)

    train(comm, strategy, Regression(comm.size, steps, torch.float32), [0.1] * steps, after_step=after)
    return before[-1] - before[1]


@pytest.mark.parametrize("size", [2, 5])
def test_bytes_are_those_of_the_formula(size: int) -> None:
    share = 2 * (size - 1) / size * 4
    table = 5 * 2 * 6
    cases: list[tuple[Strategy, float]] = [
        (SKETCH(dense_below=5), share * (table + 4 * 6 + 6)),
        (SKETCH(dense_below=5, second_round=0), share * (table + 6)),
        (SketchedSGD(0.2, dense_below=5, recovery="gather"), (size - 1) * (8 * 6 + 16) + share * 6),
        (FetchSGD(0.2, 2), share * 5 * 2 * 7),
        (FetchSGD(0.2, 2, conserving=True), share * (5 * 2 * 7 + 28)),
    ]
    for strategy, formula in cases:
        found = thinwire.run_threads(size, lambda comm, how=strategy: sent(comm, how, 3))
        assert found == pytest.approx([2 * formula] * size, rel=0, abs=0.01)


@pytest.mark.parametrize(("strategy", "crossing"), [(SketchedSGD(0.001, 10, 5), 54), (SketchedSGD(0.001, 4, 3), 16)])
def test_a_sketch_is_chosen_where_there_are_more_workers_than_rows_times_columns_and_candidates(
    strategy: SketchedSGD, crossing: int
) -> None:
    by_size = {
        size: DryRun(strategy, [100_000], workers=size, rank=0, dtype=torch.float32, bucket_bytes=1).step()
        for size in (2, crossing - 1, crossing + 1, 256)
    }
    assert [len(step.collectives) for step in by_size.values()] == [1, 1, 2, 2]
    for size, step in by_size.items():
        expected = (size - 1) * 816 if size < crossing else 2 * (size - 1) / size * 400 * crossing
        assert step.sent == pytest.approx(expected)


# -- FetchSGD ----------------------------------------------------------------------------------------------------------


def test_a_conserving_table_stays_the_sketch_of_the_residuals() -> None:
    def see(r: Replica) -> Tensor:
        return torch.cat([r.state["error_sketch"].flatten(), r.state["unsent"]])

    seen = watched(3, FetchSGD(0.1, 4, conserving=True), Regression(3, 12, torch.float32), RATES, see)
    tables, unsent = seen[:, 0, : 5 * 12], seen[:, :, 60:].sum(1)
    fixed = matrix(34, 5, 12, draw_key(0, 0)).flatten(0, 1)
    assert torch.allclose(tables, unsent @ fixed.T, rtol=0, atol=1e-5)
    assert unsent.abs().max() > 1e-3


def test_conserving_fetch_sgd_loses_nothing() -> None:
    n, size, steps = 60, 2, 10
    problem = Whole(torch.ones(size), torch.zeros(size, n))
    total = whole_gradients(steps, size, n).mean(1).sum(0)
    keep = FetchSGD(0.1, 2, momentum=0.0, conserving=True, lr_in_residual=False)
    seen = watched(size, keep, problem, [1.0] * steps, lambda r: torch.cat([r.x, r.state["unsent"]]))
    assert torch.equal(problem.start - seen[-1, 0, :n] + seen[-1, :, n:].sum(0), total)


# -- what cannot work --------------------------------------------------------------------------------------------------


test_what_cannot_work_is_refused_with_the_value_and_the_rule = refusals(
    [
        (lambda: SketchedSGD(0.0), r"fraction=0.0: must lie in \(0, 1\]"),
        (lambda: SketchedSGD(columns=0), "columns=0: must be at least 1"),
        (lambda: SketchedSGD(rows=4), "rows=4: must be odd, for a median. 5 is usual"),
        (lambda: SketchedSGD(second_round=-1), "second_round=-1"),
        (lambda: SketchedSGD(momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
        (lambda: SketchedSGD(dense_below=-1), "dense_below=-1"),
        (lambda: SketchedSGD(recovery="ring"), "recovery must be 'auto' or 'sketch' or 'gather'"),
        (lambda: FetchSGD(rows=2), "must be odd"),
        (lambda: FetchSGD(momentum=-0.1), r"must lie in \[0, 1\)"),
        (lambda: FetchSGD(second_round=0), "second_round=0"),
    ]
)


@pytest.mark.parametrize("strategy", [SketchedSGD(), FetchSGD()], ids=lambda s: type(s).__name__)
def test_optimizers_with_a_momentum_of_their_own_are_refused(strategy: Strategy) -> None:
    for optimizer in (engine.momentum, lambda model: torch.optim.AdamW(model.parameters())):
        with pytest.raises(ConfigError, match=r"it must apply .* Use torch.optim.SGD without momentum"):
            engine.attach(thinwire.CountingComm(0, 2), strategy, optimizer=optimizer)


@pytest.mark.parametrize(("n", "fits"), [(4810, "0.01"), (1000, "0.048")])
def test_a_model_that_is_too_small_for_the_fraction_of_fetch_sgd_is_warned_of(n: int, fits: str) -> None:
    def start(strategy: FetchSGD, rank: int = 0) -> None:
        strategy.start(Replica(torch.ones(n), torch.ones(n), CountingComm(rank, 2), lr=lambda: 0.1))

    with pytest.warns(UserWarning, match=rf"of {n:,} elements per step .* Use fraction={fits} or more"):
        start(FetchSGD())
    start(FetchSGD(), rank=1)
    start(FetchSGD(float(fits)))


def test_a_vector_of_small_tensors_alone_needs_no_table() -> None:
    r = Replica(torch.ones(3), torch.ones(3), CountingComm(0, 1), lr=lambda: 0.1)
    strategy = SketchedSGD(fraction=1.0, dense_below=0)
    strategy.start(r)
    strategy.before_step(r)
    assert torch.allclose(r.g, torch.ones(3))


@pytest.mark.parametrize("bad", [nan, inf])
def test_sums_that_overflow_are_refused_on_a_gpu_too(bad: float) -> None:
    with pretend_gpu():
        for device in (torch.device("cpu"), GPU):
            with pytest.raises(NonFiniteError, match="some of 3 sums over workers are NaN or infinite"):
                largest_of(torch.tensor([1.0, bad, 2.0]).to(device), 1)
            assert largest_of(torch.tensor([1.0, -3.0, 2.0]).to(device), 1).tolist() == [1]


@pytest.mark.parametrize("conserving", [False, True])
def test_a_sketch_of_unsent_gradients_that_overflows_is_refused_on_all_ranks(conserving: bool) -> None:
    def body(comm: Comm) -> str:
        worker = engine.attach(comm, FetchSGD(0.2, conserving=conserving), optimizer=plain)
        engine.steps(worker, engine.batches(comm.rank, 1))
        (r,) = worker.replicas
        r.state["error_sketch"][0, 0] = inf
        with pytest.raises(NonFiniteError) as found:
            engine.steps(worker, engine.batches(comm.rank, 1, first=1))
        return str(found.value)

    for text in thinwire.run_threads(2, body):
        assert "the sketch of unsent gradients is NaN or infinite" in text
