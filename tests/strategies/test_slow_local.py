"""Local SGD, whole: nodes, warm-up, and averages weighted by samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import local as oracles_local
from tests.oracles.local import Adam, Momentum
from tests.pool import run_processes
from tests.problems import Regression, distance, flat, watched
from tests.strategies.local_runs import adamw, begin, ended, go_on, run, sent, sgd
from thinwire import AllReduce, Comm, ConfigError, LocalSGD, SlowMo, Worker
from thinwire.plan import explain

DOUBLE = torch.float64
STEPS = 14
NODES = LocalSGD(period=2, node_size=2, global_period=6)
WEIGHTED = LocalSGD(period=4, weights="samples")


def in_nodes(n: int, node_size: int) -> Tensor:
    problem = Regression(n, STEPS, DOUBLE)
    return oracles_local.in_nodes(
        problem.gradient,
        problem.start.expand(n, -1),
        Momentum(0.05),
        STEPS,
        period=2,
        node_size=node_size,
        global_period=6,
    )


@pytest.mark.parametrize(("n", "node_size"), [(4, 2), (6, 3), (4, 4), (8, 2), (6, 2)])
def test_nodes_average_every_period_and_all_workers_every_global_period(n: int, node_size: int) -> None:
    strategy = LocalSGD(period=2, node_size=node_size, global_period=6)
    real = ended(n, strategy, Regression(n, STEPS, DOUBLE), STEPS, sgd(0.05))
    assert distance(real, in_nodes(n, node_size)) < 1e-12


def samples_of(n: int) -> list[Tensor]:
    """Every rank's samples at each step; some see nothing at some steps, and the last of them long nothing."""
    draw = torch.Generator().manual_seed(n)
    seen = torch.randint(0, 5, (STEPS, n), generator=draw).double()
    seen[5:, -1] = 0
    seen[:, 0] = seen[:, 0].clamp(min=1)
    return list(seen)


def record_samples(worker: Worker, step: int) -> None:
    """Record the samples of a step; where there are none, there is no gradient either."""
    samples = float(samples_of(worker.comm.size)[step][worker.comm.rank])
    worker.record_batch(samples)
    if not samples:
        worker.optimizer.zero_grad()


def weighted(n: int) -> Tensor:
    problem = Regression(n, STEPS, DOUBLE)
    start = problem.start.expand(n, -1)
    return oracles_local.weighted(problem.gradient, start, Momentum(0.05, 0.0), STEPS, period=4, samples=samples_of(n))


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_workers_are_weighted_by_samples_since_the_last_average(n: int) -> None:
    real = ended(n, WEIGHTED, Regression(n, STEPS, DOUBLE), STEPS, sgd(0.05, 0.0), before_step=record_samples)
    assert distance(real, weighted(n)) < 1e-11


def runs_on_processes() -> list[list[float]]:
    comm = thinwire.GroupComm()
    problem = Regression(comm.size, STEPS, DOUBLE)
    nodes = run(comm, NODES, problem, STEPS, sgd(0.05))
    weighed = run(comm, WEIGHTED, problem, STEPS, sgd(0.05, 0.0), before_step=record_samples)
    return [flat(nodes.model).tolist(), flat(weighed.model).tolist()]


def test_nodes_and_weights_equal_their_oracles_on_processes() -> None:
    rows = torch.tensor(run_processes(4, runs_on_processes), dtype=DOUBLE)
    assert distance(rows[:, 0], in_nodes(4, 2)) < 1e-12
    assert distance(rows[:, 1], weighted(4)) < 1e-11


def test_weights_need_no_message_of_their_own() -> None:
    problem = Regression(4, 8, torch.float32)
    plain, weighed = (sent(4, LocalSGD(4, weights=w), problem, 8, sgd())[0] for w in ("equal", "samples"))  # type: ignore[arg-type]
    assert plain == (2 * 1.5 * 4 * 34, 2)
    assert weighed == (2 * 1.5 * 4 * 35, 2)


def test_equal_samples_give_the_plain_mean() -> None:
    problem = Regression(3, STEPS, DOUBLE)
    plain, unrecorded, recorded = (
        ended(3, strategy, problem, STEPS, sgd(0.05), before_step=before)
        for strategy, before in [
            (LocalSGD(4), None),
            (WEIGHTED, None),
            (WEIGHTED, lambda worker, step: worker.record_batch(32)),
        ]
    )
    assert distance(unrecorded, plain) < 1e-14
    assert distance(recorded, plain) < 1e-14


def test_a_rank_that_runs_out_of_data_keeps_its_weight() -> None:
    problem, lengths = Regression(3, 8, DOUBLE), [8, 3, 1]

    def body(comm: Comm) -> Tensor:
        worker = begin(comm, WEIGHTED, problem, sgd(0.05, 0.0))
        for step in worker.join(range(lengths[comm.rank])):
            go_on(worker, problem, range(step, step + 1))
        return flat(worker.model)

    seen = [torch.tensor([float(step < length) for length in lengths], dtype=DOUBLE) for step in range(8)]
    start = problem.start.expand(3, -1)
    oracle = oracles_local.weighted(problem.gradient, start, Momentum(0.05, 0.0), 8, period=4, samples=seen)
    assert distance(torch.stack(thinwire.run_threads(3, body)), oracle) < 1e-11


def test_weights_reach_slow_momentum_and_consensus() -> None:
    problem = Regression(3, STEPS, DOUBLE)
    slow = SlowMo(LocalSGD(4, weights="samples"), period=4, momentum=0.0)
    ends = [
        ended(3, strategy, problem, STEPS, sgd(0.05, 0.0), before_step=record_samples) for strategy in (slow, WEIGHTED)
    ]
    assert torch.equal(*ends)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = go_on(begin(comm, WEIGHTED, problem, sgd(0.05, 0.0)), problem, range(4), before_step=record_samples)
        go_on(worker, problem, range(4, 6), before_step=record_samples)
        own = flat(worker.model)
        with worker.consensus() as model:
            return own, flat(model)

    results = thinwire.run_threads(3, body)
    seen = sum(samples_of(3)[4:6])
    assert isinstance(seen, Tensor)
    wanted = (seen / seen.sum()) @ torch.stack([own for own, _ in results])
    assert all(distance(agreed, wanted) < 1e-11 for _, agreed in results)


def test_weighted_nodes_average_by_their_ranks_samples() -> None:
    strategy = LocalSGD(period=2, node_size=2, global_period=4, weights="samples")
    problem = Regression(4, 4, DOUBLE)

    def record(worker: Worker, step: int) -> None:
        worker.record_batch(worker.comm.rank + 1)

    apart = ended(4, LocalSGD(100), problem, 2, sgd(0.05), before_step=record)
    real = ended(4, strategy, problem, 2, sgd(0.05), before_step=record)
    wanted = torch.stack([(apart[0] + 2 * apart[1]) / 3] * 2 + [(3 * apart[2] + 4 * apart[3]) / 7] * 2)
    assert distance(real, wanted) < 1e-11
    assert torch.equal(
        ended(4, strategy, problem, 4, sgd(0.05), before_step=record)[0:1].expand(4, -1),
        ended(4, strategy, problem, 4, sgd(0.05), before_step=record),
    )


@pytest.mark.parametrize("n", [2, 4])
def test_a_warm_up_is_all_reduce_under_momentum(n: int) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    warm = ended(n, LocalSGD(period=100, warmup_steps=STEPS), problem, STEPS, sgd(0.05))
    assert distance(warm, ended(n, AllReduce(), problem, STEPS, sgd(0.05))) < 1e-12


def test_after_the_warm_up_workers_average_every_period() -> None:
    seen = watched(3, LocalSGD(period=4, warmup_steps=3), Regression(3, 9, DOUBLE), [0.1] * 9)
    equal = [bool((step == step[:1]).all()) for step in seen]
    assert equal == [True, True, True, True, False, False, False, True, False]
    messages = [count for _, count in sent(3, LocalSGD(period=4, warmup_steps=3), Regression(3, 9, DOUBLE), 9, sgd())]
    assert messages == [5, 5, 5]


def test_bytes_of_nodes_are_those_of_the_formula() -> None:
    problem = Regression(4, 12, torch.float32)
    (nbytes, _), *_ = sent(4, NODES, problem, 12, sgd())
    vector = 4 * 34
    assert nbytes == pytest.approx(4 * (2 * 1 / 2 * vector) + 2 * (2 * 3 / 4 * vector))


def test_explain_counts_what_nodes_send() -> None:
    card = explain(LocalSGD(period=8, node_size=2, global_period=32), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == pytest.approx((3 * 1 * 4000 + 1.5 * 4000) / 32)
    assert [link.dst for link in card.links] == [1]


def test_adam_in_nodes_keeps_its_moments_local() -> None:
    problem = Regression(4, STEPS, DOUBLE)
    oracle = oracles_local.in_nodes(
        problem.gradient,
        problem.start.expand(4, -1),
        Adam(0.01),
        STEPS,
        period=2,
        node_size=2,
        global_period=6,
    )
    assert distance(ended(4, NODES, problem, STEPS, adamw(0.01)), oracle) < 1e-12


@pytest.mark.parametrize("strategy", [WEIGHTED, NODES, LocalSGD(4, warmup_steps=9)], ids=str)
def test_local_sgd_resumes_within_a_round(strategy: LocalSGD) -> None:
    problem = Regression(4, STEPS, torch.float32)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        one = go_on(begin(comm, strategy, problem, sgd()), problem, range(7), before_step=record_samples)
        saved = one.state_dict()
        go_on(one, problem, range(7, STEPS), before_step=record_samples)
        two = begin(comm, strategy, problem, sgd())
        two.load_state_dict(saved)
        return flat(one.model), flat(go_on(two, problem, range(7, STEPS), before_step=record_samples).model)

    assert all(torch.equal(one, two) for one, two in thinwire.run_threads(4, body))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(node_size=0), "node_size=0: must be at least 1"),
        (lambda: LocalSGD(node_size=2), "nodes need both"),
        (lambda: LocalSGD(global_period=16), "nodes need both"),
        (lambda: LocalSGD(period=8, node_size=2, global_period=12), "must be a multiple of period=8, such as 32"),
        (lambda: LocalSGD(period=8, node_size=2, global_period=0), "must be a multiple"),
        (lambda: LocalSGD(warmup_steps=-1), "warmup_steps=-1: must not be negative"),
        (lambda: LocalSGD(weights="bytes"), "'equal' or 'samples'"),  # type: ignore[arg-type]
        (lambda: NODES.check(5), "node_size=2 with 5 workers: ranks do not fill whole nodes"),
    ],
)
def test_nodes_and_weights_that_cannot_work_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("samples", [-1.0, float("nan"), float("inf")])
def test_negative_and_infinite_samples_are_refused(samples: float) -> None:
    worker = begin(None, WEIGHTED, Regression(1, 1, DOUBLE), sgd())
    with pytest.raises(ConfigError, match="must be finite and not negative"):
        worker.record_batch(samples)
    worker.detach()
