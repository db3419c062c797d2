# SPDX-License-Identifier: Apache-2.0
"""Slow state that is sharded over workers, kept on the host, or more exact than the parameters; means in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.grids import fast_where
from tests.methods.strategies.local_runs import ended, run, sent, sgd
from tests.problems import Irregular, Regression, flat, quadratic, watched
from thinwire import (
    AllReduce,
    Comm,
    DiLoCo,
    Gossip,
    LocalSGD,
    Offloaded,
    PushSum,
    Replica,
    Sharded,
    SlowMo,
    Strategy,
    Streaming,
)
from thinwire.methods.strategies.local.means import own_shard, ring_all_reduce_, weighted_mean_
from thinwire.methods.strategies.local.outer_optimizer import OuterOptimizer

DOUBLE = torch.float64
STEPS = 13
STRATEGIES: list[Strategy] = [
    SlowMo(period=4, momentum=0.6, lr=0.9),
    SlowMo(period=4, momentum=0.0),
    DiLoCo(period=4),
    DiLoCo(period=4, outer=OuterOptimizer("Adam", lr=0.05)),
    SlowMo(period=4, buffers="average"),
    SlowMo(PushSum(Irregular()), period=4),
    SlowMo(Gossip(), period=4),
    DiLoCo(LocalSGD(2), period=4),
    SlowMo(AllReduce(), period=4),
    Offloaded(SlowMo(period=4)),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
def test_sharded_slow_steps_give_the_same_bits(strategy: Strategy, n: int) -> None:
    problem = Regression(n, STEPS, torch.float32)
    whole, shared = (ended(n, each, problem, STEPS, sgd()) for each in (strategy, Sharded(strategy)))
    assert torch.equal(shared, whole)


@pytest.mark.parametrize("strategy", STRATEGIES[:4], ids=str)
def test_each_fragment_of_a_stream_is_sharded_by_itself(strategy: Strategy) -> None:
    problem = Regression(3, STEPS, torch.float32)
    if isinstance(strategy, DiLoCo):
        pair = (replace(strategy, fragments=3), Sharded(replace(strategy, fragments=3)))
    else:
        pair = (Streaming(strategy, fragments=3), Streaming(Sharded(strategy), fragments=3))
    whole, shared = (ended(3, each, problem, STEPS, sgd()) for each in pair)
    assert torch.equal(shared, whole)


@pytest.mark.parametrize(("n", "width"), fast_where(lambda each: each[0] in (3, 5), [(5, 3), (8, 2), (3, 7), (4, 8)]))
def test_vectors_smaller_than_the_number_of_workers_are_sharded_too(n: int, width: int) -> None:
    problem = quadratic(n, DOUBLE, width=width)
    for strategy in STRATEGIES[:3]:
        whole, shared = (ended(n, each, problem, 9, sgd()) for each in (strategy, Sharded(strategy)))
        assert torch.equal(shared, whole)


def test_each_parameter_group_s_rate_is_sharded_with_its_parameters() -> None:
    problem = Regression(3, 8, DOUBLE)
    whole, shared = (
        watched(3, each, problem, [0.1, 0.05] * 4, factors=[1.0, 0.5, 0.0])
        for each in (SlowMo(period=4), Sharded(SlowMo(period=4)))
    )
    assert torch.equal(shared, whole)


@pytest.mark.parametrize(
    ("strategy", "vectors"),
    [(Sharded(SlowMo(period=4)), 2), (Sharded(DiLoCo(period=4, outer=OuterOptimizer())), 1)],
    ids=str,
)
def test_sharding_sends_as_much_and_keeps_a_part(strategy: Strategy, vectors: int) -> None:
    problem = Regression(2, 8, torch.float32)
    assert sent(2, strategy, problem, 8, sgd())[0][0] == sent(2, LocalSGD(4), problem, 8, sgd())[0][0]
    uneven = sent(3, strategy, Regression(3, 8, torch.float32), 8, sgd())
    assert sum(nbytes for nbytes, _ in uneven) == pytest.approx(3 * 2 * 2 * 2 / 3 * 4 * 34)

    def kept(comm: Comm) -> int:
        (r,) = run(comm, strategy, problem, 8, sgd()).replicas
        return sum(x.nbytes for x in r.state.values() if x.dim())

    assert thinwire.run_threads(2, kept) == [17 * 4 * vectors] * 2


def test_slow_state_is_kept_in_single_precision_at_least() -> None:
    r = Replica(torch.ones(2, dtype=torch.bfloat16), torch.zeros(0), thinwire.CountingComm(0, 1), lr=lambda: 1.0)
    strategy = SlowMo(period=1, momentum=0.5)
    strategy.start(r)
    for _ in range(3):
        r.x -= torch.tensor([2**-8, 0.0], dtype=torch.bfloat16)
        r.step += 1
        strategy.after_step(r)
    moved = 2**-8 * (1 + 1.5 + 1.75)
    assert r.state["anchor"].dtype == r.state["slow"].dtype == torch.float32
    assert r.state["anchor"].tolist() == [pytest.approx(1 - moved), 1.0]
    assert torch.equal(r.x, r.state["anchor"].bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("strategy", STRATEGIES[:5], ids=str)
@pytest.mark.parametrize("sharded", [False, True])
def test_the_host_takes_the_slow_steps_of_a_model_on_a_gpu(strategy: Strategy, sharded: bool) -> None:
    def body(strategy: Strategy) -> tuple[Tensor, set[str]]:
        model = nn.Linear(3, 2)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.25)
        model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker = thinwire.attach(model, optimizer, Sharded(strategy) if sharded else strategy)
        for step in range(10):
            optimizer.zero_grad()
            model(torch.full((1, 3), step + 1.0, device="cuda")).square().sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return flat(model).cpu(), {x.device.type for x in worker.replicas[0].state.values() if x.dim()}

    on_gpu, on_host = body(strategy), body(Offloaded(strategy))
    assert torch.allclose(on_gpu[0], on_host[0], rtol=0, atol=1e-6)
    assert (on_gpu[1], on_host[1]) == ({"cuda"}, {"cpu"})


# -- means -------------------------------------------------------------------------------------------------------------


def drawn(rank: int, length: int) -> Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=DOUBLE)


def ring_sums(comm: Comm, members: range, length: int) -> tuple[Tensor, float]:
    x, before = drawn(comm.rank, length), comm.meter.payload_bytes
    return (ring_all_reduce_(comm, x, members) if comm.rank in members else x), comm.meter.payload_bytes - before


@pytest.mark.parametrize(("members", "length"), [(range(4), 12), (range(1, 4), 7), (range(2, 4), 1), (range(3, 4), 5)])
def test_some_ranks_compute_a_sum_without_the_others(members: range, length: int) -> None:
    results = thinwire.run_threads(4, lambda comm: ring_sums(comm, members, length))
    total = torch.stack([drawn(rank, length) for rank in members]).sum(0)
    for rank, (x, nbytes) in enumerate(results):
        if rank in members:
            assert torch.allclose(x, total, rtol=0, atol=1e-14)
            assert torch.equal(x, results[members[0]][0]), "all members hold the same bits"
            assert nbytes == 2 * (len(members) - 1) * 8 * -(-length // len(members))
        else:
            assert (nbytes, x.tolist()) == (0, drawn(rank, length).tolist())


def test_parts_of_a_vector_are_all_of_it() -> None:
    x = torch.arange(7)
    parts = thinwire.run_threads(9, lambda comm: own_shard(comm, x))
    assert torch.equal(torch.cat(parts), x)
    assert {part.numel() for part in parts} == {0, 1}


def test_where_all_weights_are_zero_the_mean_is_the_plain_one() -> None:
    def body(comm: Comm) -> Tensor:
        return weighted_mean_(drawn(comm.rank, 5), torch.zeros(()), lambda v: comm.all_reduce_(v).wait())

    plain = torch.stack([drawn(rank, 5) for rank in range(3)]).mean(0)
    assert torch.allclose(thinwire.run_threads(3, body)[0], plain, rtol=0, atol=1e-12)
