# SPDX-License-Identifier: Apache-2.0
"""Methods that hide their messages: Overlap Local-SGD, CoCoD-SGD, and fragments."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, steps
from tests.grids import fast_where
from tests.oracles import overlap as oracles
from tests.oracles.common import Descent
from tests.pool import run_processes
from tests.problems import Regression, average_outside, distance, flat, quadratic, together, train, watched
from thinwire import (
    AllReduce,
    CoCoD,
    Comm,
    ConfigError,
    DiLoCo,
    Gossip,
    Local,
    LocalSGD,
    OuterOptimizer,
    OverlapLocalSGD,
    PushSum,
    Replica,
    SlowMo,
    Strategy,
    Streaming,
)
from thinwire.core.comm.threads import ThreadComm

DOUBLE = torch.float64
STEPS = 23
RATES = [0.02 * (k + 1) for k in range(5)] + [0.1] * (STEPS - 5)

Oracle = Callable[..., Tensor]
CASES: list[tuple[Strategy, Oracle, dict[str, Any]]] = [
    (OverlapLocalSGD(period=4), partial(oracles.overlap_local_sgd, period=4, pull=0.6, momentum=0.7), {}),
    (
        OverlapLocalSGD(period=5, pull=0.3, momentum=0.0),
        partial(oracles.overlap_local_sgd, period=5, pull=0.3, momentum=0.0),
        {"momentum": 0.9, "nesterov": True},
    ),
    (
        OverlapLocalSGD(period=6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        partial(oracles.overlap_local_sgd, period=6, pull=0.5, momentum=0.9, lr=0.7, nesterov=True, delay=2),
        {"momentum": 0.9},
    ),
    (OverlapLocalSGD(period=1), partial(oracles.overlap_local_sgd, period=1, pull=0.6, momentum=0.7), {}),
    (CoCoD(period=4), partial(oracles.cocod, period=4), {"momentum": 0.9}),
    (CoCoD(period=1), partial(oracles.cocod, period=1), {}),
]


def expected(problem: Any, oracle: Oracle, n: int, settings: dict[str, Any]) -> Tensor:
    return oracle(problem.gradient, problem.start.expand(n, -1), Descent(RATES, **settings), STEPS)


@pytest.mark.parametrize(
    "strategy",
    [
        OverlapLocalSGD(period=4),
        OverlapLocalSGD(period=4, delay=2, nesterov=True),
        CoCoD(period=4),
        DiLoCo(period=4, delay=2, mixing=0.5, outer=OuterOptimizer("SGD", lr=0.8, momentum=0.5)),
        DiLoCo(period=4, delay=3, outer=OuterOptimizer("SGD", lr=0.8, momentum=0.5)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_the_first_round_counts_as_much_as_any_other(strategy: Strategy) -> None:
    def moved(comm: Comm, first: int) -> float:
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        thinwire.attach(model, optimizer, strategy, comm=comm)
        for step in range(200):
            model.weight.grad = torch.full_like(model.weight, float(first <= step < first + 4))
            optimizer.step()
        return model.weight.item()

    first, later = (thinwire.run_threads(2, lambda comm, k=k: moved(comm, k)) for k in (0, 12))
    assert first == pytest.approx(later, abs=1e-9)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [1, 3, 4]))
def test_every_method_that_overlaps_equals_its_oracle(n: int) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    for strategy, oracle, settings in CASES:
        assert (
            distance(together(n, strategy, problem, RATES, **settings), expected(problem, oracle, n, settings)) < 1e-12
        )


def ends(comm: Comm) -> list[list[float]]:
    problem = Regression(comm.size, STEPS, DOUBLE)
    chosen = [(strategy, settings) for strategy, _, settings in CASES]
    chosen.append((Streaming(OverlapLocalSGD(period=4), fragments=3), {}))
    return [flat(train(comm, strategy, problem, RATES, **settings).model).tolist() for strategy, settings in chosen]


def on_processes() -> list[list[float]]:
    return ends(thinwire.GroupComm(timeout=20))


# The battery has every strategy on two processes.
@pytest.mark.slow
def test_on_processes_they_end_where_threads_do_and_where_their_oracles_do() -> None:
    n = 4
    rows = torch.tensor(run_processes(n, on_processes), dtype=DOUBLE)
    problem = Regression(n, STEPS, DOUBLE)
    for i, (strategy, oracle, settings) in enumerate(CASES):
        assert distance(rows[:, i], expected(problem, oracle, n, settings)) < 1e-12, strategy
    in_threads = torch.tensor(thinwire.run_threads(n, ends), dtype=DOUBLE)
    assert distance(rows[:, -1], in_threads[:, -1]) < 1e-12


@pytest.mark.parametrize("slow_rank", [0, 2])
@pytest.mark.slow
def test_a_slow_wire_gives_the_same_bits(slow_rank: int) -> None:
    """Slow messages change nothing: a mean is used at its step, never as soon as it has arrived."""

    class SlowWire(ThreadComm):
        def _all_reduce_(self, x: Tensor) -> Any:
            work = super()._all_reduce_(x)

            def late(total: Tensor) -> Tensor:
                if self.rank == slow_rank:
                    pause.wait(0.01)
                return total

            return work.then(late)

    import threading

    pause = threading.Event()
    problem = Regression(3, STEPS, torch.float32)
    for strategy in (OverlapLocalSGD(period=3), CoCoD(period=3), Streaming(OverlapLocalSGD(period=4), fragments=2)):
        quick = together(3, strategy, problem, RATES, momentum=0.9)

        def work(comm: Comm, strategy: Strategy = strategy) -> Tensor:
            assert isinstance(comm, ThreadComm)
            slow = SlowWire(comm._hub, comm.rank)  # pyright: ignore[reportPrivateUsage]
            return flat(train(slow, strategy, problem, RATES, momentum=0.9).model)

        assert torch.equal(torch.stack(thinwire.run_threads(3, work)), quick)


def common(strategy: OverlapLocalSGD) -> Callable[[Replica], Tensor]:
    """This worker's term of the conserved combination, whose mean over workers is y."""
    a = strategy.lr / (strategy.pull * (1 - strategy.momentum) + strategy.lr * (1 - strategy.pull))

    def see(r: Replica) -> Tensor:
        return a * r.x + (1 - a) * r.state["anchor"] + a * strategy.pull * strategy.momentum * r.state["velocity"]

    return see


VARIANTS = [
    OverlapLocalSGD(period=2, pull=0.6, momentum=0.0),
    OverlapLocalSGD(period=2, pull=0.6, momentum=0.7),
    OverlapLocalSGD(period=2, pull=0.2, momentum=0.7),
    OverlapLocalSGD(period=3, pull=0.5, momentum=0.9, lr=0.4, nesterov=True),
    OverlapLocalSGD(period=4, pull=0.5, momentum=0.9, lr=0.4, nesterov=True, delay=1),
]


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
def test_without_gradients_the_common_model_is_conserved(strategy: OverlapLocalSGD) -> None:
    n = 4
    starts = torch.randn(n, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    rates = [0.0] * 40
    seen = watched(n, strategy, quadratic(n, DOUBLE), rates, common(strategy), starts=starts).mean(1)
    assert (seen - starts.mean(0)).abs().max() < 1e-12


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
@pytest.mark.slow
def test_workers_agree_at_last_when_nothing_is_learned(strategy: OverlapLocalSGD) -> None:
    starts = torch.randn(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(6))
    starts = starts[:3]
    ends_at = together(3, strategy, quadratic(3, DOUBLE), [0.0] * 60 * strategy.period, starts=starts)
    assert (ends_at - ends_at.mean(0)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("pull", "momentum", "factor"), [(0.6, 0.7, 0.690), (0.5, 0.7, 0.769), (0.2, 0.7, 0.930), (0.6, 0.9, 0.870)]
)
def test_progress_is_the_share_of_the_learning_rate_that_counts(pull: float, momentum: float, factor: float) -> None:
    strategy = OverlapLocalSGD(period=4, pull=pull, momentum=momentum)
    assert strategy.progress == pytest.approx(factor, abs=6e-4)
    assert pace(strategy) == pytest.approx(strategy.progress, rel=1e-4)


@pytest.mark.slow  # the progress of other pulls and momenta is asked above
@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
def test_every_variant_is_as_fast_as_its_progress(strategy: OverlapLocalSGD) -> None:
    assert pace(strategy) == pytest.approx(strategy.progress, rel=1e-4)


def test_compensation_makes_up_for_the_pull() -> None:
    strategy = OverlapLocalSGD(period=4, compensate=True)
    assert pace(strategy) == pytest.approx(1, rel=1e-4)


def pace(strategy: OverlapLocalSGD) -> float:
    """How fast a steady gradient moves the workers, against plain SGD."""

    class Slope:
        start = torch.zeros(2, dtype=DOUBLE)
        model = quadratic(2, DOUBLE, width=2).model

        def loss(self, model: Any, rank: int, step: int) -> Tensor:
            return -model().sum()

        def gradient(self, x: Tensor, step: int) -> Tensor:
            return -torch.ones_like(x)

    rounds = 40
    count = rounds * strategy.period
    seen = watched(2, strategy, Slope(), [0.01] * count)
    late, later = seen[count // 2 - 1, 0, 0], seen[-1, 0, 0]
    return float((later - late) / (0.01 * count / 2))


def test_a_share_of_the_momentum_on_every_worker_is_the_same_method() -> None:
    n, rates = 4, [0.1] * STEPS
    problem = Regression(n, STEPS, DOUBLE)
    mine = together(n, OverlapLocalSGD(period=3), problem, rates)
    theirs = oracles.overlap_by_local_momentum(
        problem.gradient, problem.start.expand(n, -1), Descent(rates), STEPS, period=3, pull=0.6, momentum=0.7
    )
    assert distance(mine, theirs) < 1e-12


def test_without_pull_workers_train_as_if_alone() -> None:
    problem = Regression(3, STEPS, torch.float32)
    alone = together(3, Local(), problem, RATES, momentum=0.9)
    assert torch.equal(
        together(3, OverlapLocalSGD(period=4, pull=0.0, momentum=0.0), problem, RATES, momentum=0.9), alone
    )


def test_the_mean_of_cocod_moves_by_the_mean_of_its_rounds() -> None:
    n, period = 4, 3
    starts = torch.randn(n, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(7))
    seen = watched(n, CoCoD(period), quadratic(n, DOUBLE), [0.0] * 12, starts=starts)
    assert (seen.mean(1) - starts.mean(0)).abs().max() < 1e-15
    moving = watched(n, CoCoD(period), Regression(n, 12, DOUBLE), [0.1] * 12).mean(1)
    local = watched(n, Local(), Regression(n, 12, DOUBLE), [0.1] * 12).mean(1)
    assert torch.allclose(moving[: 2 * period - 1], local[: 2 * period - 1], rtol=0, atol=1e-14)


def test_elastic_averaging_conserves_the_sum_of_workers_and_centre() -> None:
    """The symmetric relative conserves the plain sum, which Overlap Local-SGD does not."""
    x = torch.randn(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(8))
    ended = oracles.elastic(lambda x, k: torch.zeros_like(x), x, Descent([0.1] * 12), 12, period=2, pull=0.2)
    assert (ended.sum(0) - x.sum(0) - x.mean(0)).abs().max() < 1e-13
    assert (ended - ended.mean(0)).abs().max() < 0.5 * (x - x.mean(0)).abs().max()


@pytest.mark.slow
def test_on_unlike_quadratics_the_gradients_cancel_where_training_ends() -> None:
    n = 4
    problem = quadratic(n, DOUBLE)
    for strategy in (OverlapLocalSGD(period=1), CoCoD(period=1)):
        x = watched(n, strategy, problem, [0.1] * 120)[-1]
        assert problem.gradient(x, 0).sum(0).abs().max() < 0.05
        assert (x - x.mean(0)).abs().max() < 0.2


@pytest.mark.parametrize("base", [OverlapLocalSGD(period=4), LocalSGD(4), SlowMo(period=4), CoCoD(period=4)], ids=str)
def test_one_fragment_is_the_base(base: Strategy) -> None:
    problem = Regression(3, STEPS, torch.float32)
    assert torch.equal(
        together(3, Streaming(base, fragments=1), problem, RATES, momentum=0.9),
        together(3, base, problem, RATES, momentum=0.9),
    )


def test_each_fragment_follows_the_base_ahead_of_time() -> None:
    """Fragment f of a streamed method is that part of the base, some steps ahead."""
    n, period, fragments = 3, 6, 3
    problem = quadratic(n, DOUBLE, width=7)
    mine = together(n, Streaming(OverlapLocalSGD(period=period), fragments=fragments), problem, RATES)
    for f in range(fragments):
        where = slice(f * 7 // fragments, (f + 1) * 7 // fragments)
        ahead = f * period // fragments
        idle = [0.0] * ahead + RATES
        theirs = oracles.overlap_local_sgd(
            problem.gradient,
            problem.start.expand(n, -1),
            Descent(idle),
            STEPS + ahead,
            period=period,
            pull=0.6,
            momentum=0.7,
        )
        assert distance(mine[:, where], theirs[:, where]) < 1e-12


def peaks(strategy: Strategy, count: int = 24, size: int = 6400) -> tuple[float, float]:
    """The largest message of any step, and all bytes."""
    card = thinwire_explain(strategy, size)
    return max(card), sum(card) / len(card) * count


def thinwire_explain(strategy: Strategy, size: int) -> list[float]:
    comm = thinwire.CountingComm(0, 4)
    x = torch.empty(size, device="meta")
    r = Replica(x, torch.empty(0, device="meta"), comm, lr=lambda: 0.1)
    strategy.start(r)
    sent: list[float] = []
    for _ in range(48):
        before = comm.meter.payload_bytes
        strategy.before_step(r)
        r.step += 1
        strategy.after_step(r)
        sent.append(comm.meter.payload_bytes - before)
    return sent


def test_fragments_lower_the_peak_and_not_the_sum() -> None:
    whole, streamed = OverlapLocalSGD(period=8), Streaming(OverlapLocalSGD(period=8), fragments=4)
    (peak, total), (low, same) = peaks(whole), peaks(streamed)
    assert peak == 4 * low == 2 * 3 / 4 * 4 * 6400
    assert total == same


@pytest.mark.parametrize("strategy", [OverlapLocalSGD(period=4), CoCoD(period=4)], ids=str)
def test_bytes_are_those_of_local_sgd(strategy: Strategy) -> None:
    assert thinwire_explain(strategy, 100) == thinwire_explain(LocalSGD(4), 100)


@pytest.mark.parametrize(
    "strategy",
    [
        OverlapLocalSGD(period=4),
        OverlapLocalSGD(period=4, compensate=True),
        OverlapLocalSGD(period=5, delay=2),
        CoCoD(period=4),
        Streaming(OverlapLocalSGD(period=4), fragments=2),
        Streaming(SlowMo(period=4), fragments=3),
        SlowMo(OverlapLocalSGD(period=3), period=7),
    ],
    ids=str,
)
@pytest.mark.parametrize("cut", fast_where(lambda cut: cut == 5, [4, 5, 6]))
def test_resuming_with_a_mean_in_flight_is_the_uninterrupted_run(strategy: Strategy, cut: int) -> None:
    def work(comm: Comm) -> tuple[bool, bool]:
        worker = steps(attach(comm, strategy), batches(comm.rank, cut))
        saved = worker.state_dict(model=True, optimizer=True)
        through = flat(steps(worker, batches(comm.rank, 9, cut)).model)
        again = attach(comm, strategy)
        again.load_state_dict(saved)
        return torch.equal(flat(steps(again, batches(comm.rank, 9, cut)).model), through), any(
            "/inflight/" in name for name in saved
        )

    results = thinwire.run_threads(3, work, timeout=20)
    assert all(same for same, _ in results)
    if strategy in (OverlapLocalSGD(period=4), CoCoD(period=4)):
        assert all(flying for _, flying in results)


@pytest.mark.parametrize("base", [OverlapLocalSGD(period=3), CoCoD(period=3)], ids=str)
def test_after_a_slow_step_no_mean_of_older_parameters_is_in_flight(base: Strategy) -> None:
    def body(comm: Comm) -> tuple[bool, Tensor]:
        worker = train(comm, SlowMo(base, period=4), quadratic(3, DOUBLE), [0.1] * 8)
        (r,) = worker.replicas
        means = [torch.equal(mean, r.x) for work in r.inflight.values() for mean in work.wait()]
        return all(means), r.x.clone()

    results = thinwire.run_threads(3, body)
    assert all(fresh for fresh, _ in results)
    assert all(torch.equal(x, results[0][1]) for _, x in results)


WRONG: list[tuple[Callable[[], Strategy], str]] = [
    (lambda: OverlapLocalSGD(period=0), "period=0: must be at least 1"),
    (lambda: OverlapLocalSGD(pull=1.0), r"pull=1.0: must lie in \[0, 1\). At 1 every step would be undone"),
    (lambda: OverlapLocalSGD(momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
    (lambda: OverlapLocalSGD(lr=0.0), "lr=0.0: .* positive"),
    (lambda: OverlapLocalSGD(period=4, delay=5), "delay=5: must lie in 1..4"),
    (lambda: OverlapLocalSGD(period=4, delay=2, compensate=True), "compensate=True with delay=2"),
    (lambda: CoCoD(period=0), "period=0"),
    (lambda: Streaming(Gossip()), "has no period"),
    (lambda: Streaming(PushSum()), "has no period"),
    (lambda: Streaming(SlowMo(AllReduce(), period=4)), "sends gradients"),
    (lambda: Streaming(LocalSGD(4), fragments=5), "fragments=5: must lie between 1 and the base's period=4"),
    (lambda: Streaming(LocalSGD(4), fragments=0), "fragments=0"),
    (lambda: Streaming(SlowMo(period=4, buffers="reset"), fragments=2), "buffers='maintain'"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[words for _, words in WRONG])
def test_recipes_that_cannot_work_are_refused_with_the_reason(make: Callable[[], Strategy], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert re.search(words, str(refused.value))


@pytest.mark.parametrize("strategy", VARIANTS, ids=str)
def test_after_an_average_from_outside_the_anchor_does_not_go_on_moving(strategy: OverlapLocalSGD) -> None:
    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        (r,) = worker.replicas

        def step() -> None:
            optimizer.zero_grad()
            model(torch.full((1, 3), comm.rank + 1.0, dtype=DOUBLE)).sum().backward()
            optimizer.step()

        for _ in range(4 * strategy.period):
            step()
        average_outside(strategy, r)
        average = r.x.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(3 * strategy.period):
            step()
        return average, r.x.clone()

    for average, later in thinwire.run_threads(2, work):
        assert (later - average).abs().max() < 1e-12
