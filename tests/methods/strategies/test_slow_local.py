# SPDX-License-Identifier: Apache-2.0
"""Local SGD, whole: averages within nodes, warm-up, and averages weighted by samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.methods.strategies.local_runs import begin, ended, go_on, sent, sgd
from tests.oracles import updates
from tests.oracles.common import Descent
from tests.oracles.machines import Means, Nodes, path
from tests.problems import Regression, distance, flat, quadratic, watched
from tests.rules import refusals
from thinwire import (
    Comm,
    Fp32,
    Local,
    LocalSGD,
    NodeAverage,
    OverlapLocalSGD,
    Probe,
    PushSum,
    SlowMo,
    Streaming,
    Worker,
)
from thinwire.planning.plan import explain

DOUBLE = torch.float64
STEPS = 14
NODES = NodeAverage(LocalSGD(6), period=2, node_size=2)
WEIGHTED = LocalSGD(period=4, weights="samples")


def in_nodes(n: int, node_size: int, warmup: int = 0) -> Tensor:
    problem, rates = Regression(n, STEPS, DOUBLE), [0.05] * STEPS
    machine, start = Nodes(Means(6, warmup=warmup), 2, 6, node_size), problem.start.expand(n, -1)
    return path(machine, problem.gradient, start, Descent(rates, momentum=0.9), rates)[-1]


@pytest.mark.parametrize(("n", "node_size"), [(4, 2), (6, 3), (4, 4), (8, 2), (6, 2)])
def test_nodes_average_every_period_and_all_workers_every_global_period(n: int, node_size: int) -> None:
    strategy = NodeAverage(LocalSGD(6), period=2, node_size=node_size)
    real = ended(n, strategy, Regression(n, STEPS, DOUBLE), STEPS, sgd(0.05))
    assert distance(real, in_nodes(n, node_size)) < 1e-12


def test_nodes_do_not_average_again_during_the_warm_up() -> None:
    strategy = NodeAverage(LocalSGD(6, warmup_steps=5), period=2)
    problem = Regression(4, STEPS, DOUBLE)
    assert distance(ended(4, strategy, problem, STEPS, sgd(0.05)), in_nodes(4, 2, warmup=5)) < 1e-12
    warm = sent(4, strategy, problem, 5, sgd())
    assert warm == sent(4, LocalSGD(6, warmup_steps=5), problem, 5, sgd())


def test_nodes_average_between_averages_of_compressed_differences() -> None:
    problem = Regression(4, STEPS, DOUBLE)
    coded = ended(4, NodeAverage(LocalSGD(6, codec=Fp32()), period=2), problem, STEPS, sgd(0.05))
    assert distance(coded, in_nodes(4, 2)) < 1e-6


def test_each_fragment_of_a_stream_averages_within_nodes_at_its_own_steps() -> None:
    # Elements of a quadratic do not depend on each other, so the first fragment is that of a run without fragments.
    problem, base = quadratic(4, DOUBLE, width=6), NodeAverage(LocalSGD(6), period=2)
    whole, stream = (ended(4, each, problem, 11, sgd(0.05)) for each in (base, Streaming(base, fragments=2)))
    assert torch.equal(stream[:, :3], whole[:, :3])
    # The second one is a step ahead, so its nodes have just averaged.
    assert torch.equal(stream[::2, 3:], stream[1::2, 3:])
    assert not torch.equal(whole[::2, 3:], whole[1::2, 3:])


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


def weighted(problem: Regression, samples: list[Tensor]) -> Tensor:
    start, update = problem.start.expand(problem.size, -1), Descent([0.05] * problem.steps)
    return updates.weighted(problem.gradient, start, update, problem.steps, period=4, samples=samples)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_workers_are_weighted_by_samples_since_the_last_average(n: int) -> None:
    problem = Regression(n, STEPS, DOUBLE)
    real = ended(n, WEIGHTED, problem, STEPS, sgd(0.05, 0.0), before_step=record_samples)
    assert distance(real, weighted(problem, samples_of(n))) < 1e-11


def test_weights_need_no_message_of_their_own() -> None:
    problem = Regression(4, 8, torch.float32)
    plain, weighed = (sent(4, LocalSGD(4, weights=w), problem, 8, sgd())[0] for w in ("equal", "samples"))  # type: ignore[arg-type]
    assert plain == (2 * 1.5 * 4 * 34, 2)
    assert weighed == (2 * 1.5 * 4 * 35, 2)


def test_a_rank_that_runs_out_of_data_keeps_its_weight() -> None:
    problem, lengths = Regression(3, 8, DOUBLE), [8, 3, 1]

    def body(comm: Comm) -> Tensor:
        worker = begin(comm, WEIGHTED, problem, sgd(0.05, 0.0))
        for step in worker.join(range(lengths[comm.rank])):
            go_on(worker, problem, range(step, step + 1))
        return flat(worker.model)

    seen = [torch.tensor([float(step < length) for length in lengths], dtype=DOUBLE) for step in range(8)]
    assert distance(torch.stack(thinwire.run_threads(3, body)), weighted(problem, seen)) < 1e-11


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
    strategy = NodeAverage(LocalSGD(4, weights="samples"), period=2)
    problem = Regression(4, 4, DOUBLE)

    def record(worker: Worker, step: int) -> None:
        worker.record_batch(worker.comm.rank + 1)

    apart = ended(4, LocalSGD(100), problem, 2, sgd(0.05), before_step=record)
    real = ended(4, strategy, problem, 2, sgd(0.05), before_step=record)
    wanted = torch.stack([(apart[0] + 2 * apart[1]) / 3] * 2 + [(3 * apart[2] + 4 * apart[3]) / 7] * 2)
    assert distance(real, wanted) < 1e-11
    whole = ended(4, strategy, problem, 4, sgd(0.05), before_step=record)
    assert torch.equal(whole, whole[:1].expand_as(whole))


def test_after_the_warm_up_workers_average_every_period() -> None:
    seen = watched(3, LocalSGD(period=4, warmup_steps=3), Regression(3, 9, DOUBLE), [0.1] * 9)
    equal = [bool((step == step[:1]).all()) for step in seen]
    assert equal == [True, True, True, True, False, False, False, True, False]
    messages = [count for _, count in sent(3, LocalSGD(period=4, warmup_steps=3), Regression(3, 9, DOUBLE), 9, sgd())]
    assert messages == [5, 5, 5]


def test_explain_counts_what_nodes_send() -> None:
    card = explain(NodeAverage(LocalSGD(period=32), period=8), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == pytest.approx((3 * 1 * 4000 + 1.5 * 4000) / 32)
    assert [link.dst for link in card.links] == [1]


test_nodes_and_weights_that_cannot_work_are_refused = refusals(
    [
        (lambda: NodeAverage(node_size=0), "node_size=0: must be at least 1"),
        (lambda: NodeAverage(period=0), "period=0: must be at least 1"),
        (lambda: NodeAverage(LocalSGD(12), period=8), "period=8: must divide the base's period=12"),
        (lambda: NodeAverage(Local()), r"must take local steps between averages over all workers. Use LocalSGD\(\)"),
        (lambda: NodeAverage(SlowMo(exact=False), 4), "must take local steps between averages"),
        (lambda: NodeAverage(SlowMo(PushSum()), 4), "must take local steps between averages"),
        (lambda: NodeAverage(SlowMo(Probe(Local())), 4), "must take local steps between averages"),
        (lambda: NodeAverage(Streaming(LocalSGD(8)), 4), "must take local steps between averages"),
        (lambda: NodeAverage(OverlapLocalSGD(8), 4), "must take local steps between averages"),
        (lambda: LocalSGD(warmup_steps=-1), "warmup_steps=-1: must be at least 0"),
        (lambda: LocalSGD(weights="bytes"), "'equal' or 'samples'"),  # type: ignore[arg-type]
        (lambda: NODES.check(5), "node_size=2 with 5 workers: ranks do not fill whole nodes"),
    ]
)
