# SPDX-License-Identifier: Apache-2.0
"""Plain means within nodes and coded ones between them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.battery.runs import case, with_
from tests.battery.test_strategies import saved_and_resumed
from tests.grids import fast_where
from tests.oracles import codecs as oracles
from tests.oracles.common import Descent
from tests.oracles.machines import Means, path
from tests.pool import run_processes
from tests.problems import Regression, distance, flat, normal, together, train
from tests.rules import for_each
from thinwire import (
    AllReduce,
    BetweenNodes,
    Bf16,
    Codec,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    Fp32,
    LocalSGD,
    Nearest,
    OneBit,
    PowerSGD,
)
from thinwire.core.comm.group import comm_for
from thinwire.core.comm.members import Members
from thinwire.core.replica.flat import Segment
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_
from thinwire.planning.plan import explain

RATES = [0.1] * 8


@pytest.mark.parametrize("use", [AllReduce, lambda c: LocalSGD(2, codec=c), lambda c: DiLoCo(period=2, codec=c)])
def test_without_loss_it_is_the_plain_mean(use: Any) -> None:
    problem = Regression(4, 8, torch.float32)
    # A factor of as many columns as a matrix has loses nothing either.
    exact = Fp32(), PowerSGD(64, min_ratio=0)
    plain, *coded = (together(4, use(codec), problem, RATES) for codec in (Fp32(), *map(BetweenNodes, exact)))
    for nodes in coded:
        assert distance(nodes, plain) < 1e-5
        assert torch.equal(nodes, nodes[:1].expand_as(nodes))


def test_low_rank_means_are_those_of_the_nodes_means_matrix_by_matrix() -> None:
    shapes = ((8, 6), (5,), (6, 10), (4, 12), (3,))
    edges = [0, *accumulate(torch.Size(shape).numel() for shape in shapes)]
    segments = [
        Segment("", start, shape, (shape[-1], 1)[-len(shape) :])
        for start, shape in zip(edges[:-1], shapes, strict=True)
    ]

    def means(size: int, codec: Codec, of: Any) -> list[list[Tensor]]:
        def body(comm: Comm) -> list[Tensor]:
            state: dict[str, Tensor] = {}
            vectors = (of(comm.rank, message) for message in range(4))
            return [compressed_mean_(comm, x, codec, state, key=9, segments=segments).wait().clone() for x in vectors]

        return thinwire.run_threads(size, body, timeout=20)

    def one(rank: int, message: int) -> Tensor:
        return normal(edges[-1], 10 * message + rank)

    def node(rank: int, message: int) -> Tensor:
        return (one(2 * rank, message) + one(2 * rank + 1, message)) / 2

    codec = PowerSGD(2, min_ratio=0)
    found, expected = means(4, BetweenNodes(codec), one), means(2, codec, node)
    for mine in found:
        for mean, reference in zip(mine, expected[0], strict=True):
            assert distance(mean, reference) < 1e-5


def test_a_node_with_fewer_tensors_than_ranks_leaves_some_without_a_part() -> None:
    def body(comm: Comm) -> Tensor:
        codec = BetweenNodes(PowerSGD(2, min_ratio=0), node_size=3)
        segments = [Segment("", 0, (4, 2), (2, 1))]
        return compressed_mean_(comm, normal(8, comm.rank), codec, {}, segments=segments).wait()

    for found in thinwire.run_threads(6, body, timeout=20):
        assert distance(found, torch.stack([normal(8, rank) for rank in range(6)]).mean(0)) < 1e-5


def test_nodes_of_one_are_the_codec_itself() -> None:
    problem, codec = Regression(3, 8, torch.float32), ErrorFeedback(OneBit(8))
    nodes, plain = (together(3, AllReduce(each), problem, RATES) for each in (BetweenNodes(codec, 1), codec))
    assert torch.equal(nodes, plain)


def test_it_is_the_coded_mean_of_the_nodes_means() -> None:
    """Parts of the vector are coded by different ranks, in the blocks of the whole."""
    problem, n = Regression(4, 8, torch.float32), 34
    found = together(4, LocalSGD(2, codec=BetweenNodes(ErrorFeedback(OneBit(8)))), problem, RATES)
    # Each node's two parts, of three blocks and of the rest, and within them the pieces of two servers.
    parts = oracles.TwoStages(oracles.signs(8), 8, [24, n - 24])

    def mean(rows: Tensor, k: int) -> Tensor:
        return parts(rows.view(2, 2, -1).mean(1))

    start, machine = problem.start.expand(4, -1), Means(2, agree=oracles.coded(mean))
    expected = path(machine, problem.gradient, start, Descent(RATES), RATES)[-1]
    assert distance(found, expected) < 2e-5
    assert torch.equal(found, found[:1].expand_as(found))


def test_bytes_between_nodes_are_those_of_the_codec_for_a_part() -> None:
    n, m, nodes = 1 << 20, 4, 2
    card = explain(AllReduce(BetweenNodes(ErrorFeedback(OneBit()), m)), parameters=[n], workers=m * nodes)
    within = 2 * (m - 1) / m * 4 * n + (m - 1) * 4
    between = 2 * (nodes - 1) * (16 + OneBit().nbytes(n // m // nodes))
    assert card.sent_bytes_per_step == within + between


def test_members_reduce_and_gather_among_themselves() -> None:
    def body(comm: Comm) -> tuple[list[float], list[float], list[float], float]:
        odd = Members(comm, range(comm.rank % 2, 6, 2))
        x = torch.tensor([float(comm.rank), 1.0])
        return (
            odd.all_reduce_(x.clone()).wait().tolist(),
            [row[0].item() for row in odd.all_gather(x).wait()],
            odd.broadcast_(x.clone(), 1).wait().tolist(),
            odd.all_reduce_(x.clone(), op="min").wait()[0].item(),
        )

    found = thinwire.run_threads(6, body)
    assert found[2] == ([6.0, 3.0], [0.0, 2.0, 4.0], [2.0, 1.0], 0.0)
    assert found[5] == ([9.0, 3.0], [1.0, 3.0, 5.0], [3.0, 1.0], 1.0)


# Pieces, and factors.
RECIPES = [AllReduce(BetweenNodes(codec)) for codec in (ErrorFeedback(Nearest(2, 8)), PowerSGD(1, min_ratio=0))]


def on_processes() -> list[list[float]]:
    comm, problem = comm_for(), Regression(4, 4, torch.float32)
    return [flat(train(comm, strategy, problem, RATES[:4]).model).tolist() for strategy in RECIPES]


def test_processes_train_as_threads_do() -> None:
    problem = Regression(4, 4, torch.float32)
    found = run_processes(4, on_processes)
    for place, strategy in enumerate(RECIPES):
        expected = together(4, strategy, problem, RATES[:4])
        assert [each[place] for each in found] == expected.tolist(), strategy


def test_wrong_nodes_are_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="node_size=0: must be at least 1"):
        BetweenNodes(node_size=0)
    with pytest.raises(ConfigError, match="the shapes of tensors are not known here"):
        thinwire.ddp_hook(BetweenNodes(PowerSGD()))
    with pytest.raises(ConfigError, match="Put ErrorFeedback inside"):
        ErrorFeedback(BetweenNodes(OneBit()))
    with pytest.raises(ConfigError, match="nested nodes"):
        BetweenNodes(BetweenNodes())
    with pytest.raises(ConfigError, match=r"with 3 workers: ranks do not fill whole nodes. Use a divisor of 3"):
        explain(AllReduce(BetweenNodes(Bf16())), parameters=[100], workers=3)


WITH_A_CODEC = [
    "AllReduce({})",
    *(f"{name}(period=4, codec={{}})" for name in ("LocalSGD", "DiLoCo", "OverlapLocalSGD", "CoCoD", "EASGD")),
    "DiLoCo(period=4, fragments=2, codec={})",
    "Streaming(LocalSGD(period=4, codec={}))",
    "SlowMo(LocalSGD(period=4, codec={}), period=8)",
    "Budget(LocalSGD(period=4, codec={}), '1MB/step')",
]


@for_each(WITH_A_CODEC)
def test_workers_that_do_not_fill_nodes_are_refused_before_the_first_step(recipe: str) -> None:
    strategy = thinwire.parse(recipe.format("BetweenNodes(ErrorFeedback(Nearest()))"))

    def body(comm: Comm) -> None:
        model = torch.nn.Linear(8, 4)
        with pytest.raises(ConfigError, match="node_size=2 with 3 workers: ranks do not fill whole nodes"):
            thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, comm=comm)

    thinwire.run_threads(3, body, timeout=20)
    with pytest.raises(ConfigError, match="ranks do not fill whole nodes"):
        explain(strategy, parameters=100, workers=3)


@pytest.mark.parametrize("recipe", WITH_A_CODEC[:-2])
def test_a_worker_alone_trains(recipe: str) -> None:
    strategy = thinwire.parse(recipe.format("BetweenNodes(ErrorFeedback(Nearest()))"))
    assert together(1, strategy, Regression(1, 8, torch.float32), RATES).isfinite().all()


@pytest.mark.parametrize("recipe", fast_where(lambda each: each in WITH_A_CODEC[:2], WITH_A_CODEC[:-1]))
def test_low_rank_means_between_nodes_resume_bitwise(recipe: str, tmp_path: Path) -> None:
    each = case(thinwire.parse(recipe.format("BetweenNodes(PowerSGD(1, min_ratio=0))")), lambda s: s.start)
    saved_and_resumed(with_(each, size=4, dtype=torch.float32), tmp_path)
