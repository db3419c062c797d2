# SPDX-License-Identifier: Apache-2.0
"""Where ranks send unlike each other, `explain` and the planner give a real run's busiest and mean, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import nn

import thinwire
from tests.grids import fast_where
from thinwire import Comm, Gossip, LocalSGD, PushSum, Ring, Strategy, Topology, parse
from thinwire.cli import main
from thinwire.lab import tasks
from thinwire.methods.topology import Peers
from thinwire.planning.plan import Card, explain
from thinwire.planning.plan.predict import ModelTime, predict
from thinwire.planning.plan.ranks import Looks, look_at_ranks
from thinwire.planning.plan.traffic import DryRun
from thinwire.planning.simulate import Network

CODECS = [
    "None",
    "Bf16",
    "Quantize(4)",
    "ErrorFeedback(Nearest(bits=4))",
    "ErrorFeedback(OneBit)",
    "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(ChunkedTopK)",
    "PowerSGD(rank=2)",
]
RECIPES = [f"LocalSGD(period=2, codec={codec})" for codec in CODECS]
RECIPES += ["AllReduce", "AllReduce(Quantize(4))", "AllReduce(ErrorFeedback(OneBit))", "PushSum"]
RECIPES += ["DiLoCo(period=2, codec=ErrorFeedback(Gathered(ChunkedTopK)))", "SlowMo(PushSum, period=2)"]
KINDS = [RECIPES[place] for place in (0, 2, 5, 7, 8, 10, 11, 12)]


def digits() -> nn.Module:
    return tasks.load("digits").model(seed=0)


def bytes_of_ranks(strategy: Strategy, workers: int, period: int) -> list[float]:
    """What each rank's meter has counted, a step, in two periods of a run."""

    def work(comm: Comm) -> float:
        model = digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        draws, before = torch.Generator().manual_seed(comm.rank), 0.0
        while worker.step < 4 * period:
            if worker.step == 2 * period:
                before = comm.meter.payload_bytes
            optimizer.zero_grad()
            model(torch.randn(4, 64, generator=draws)).square().mean().backward()
            optimizer.step()
        counted = comm.meter.payload_bytes - before
        worker.detach()
        return counted / (2 * period)

    return thinwire.run_threads(workers, work)


@pytest.mark.parametrize(
    ("recipe", "workers"),
    # Of each kind of traffic one recipe, with one of the numbers of workers in turn.
    fast_where(lambda each: each[0] in KINDS and KINDS.index(each[0]) % 2 == each[1] - 2, product(RECIPES, (2, 3))),
)
@pytest.mark.slow
def test_explain_and_the_planner_give_the_bytes_of_every_rank_of_a_run(recipe: str, workers: int) -> None:
    strategy = parse(recipe)
    assert isinstance(strategy, Strategy)
    card = explain(strategy, parameters=digits(), workers=workers)
    planned = predict(
        strategy, parameters=digits(), workers=workers, network=Network(1e8), model_time=ModelTime(0.01, 0.01)
    )
    counts = bytes_of_ranks(strategy, workers, card.period)
    assert card.mean_sent_bytes_per_step is not None
    figures = [card.sent_bytes_per_step, counts[card.rank], planned.busiest_bytes]
    assert figures == pytest.approx([max(counts)] * 3, rel=0, abs=1e-6)
    means = [card.mean_sent_bytes_per_step, planned.payload_bytes]
    assert means == pytest.approx([sum(counts) / workers] * 2, rel=0, abs=1e-6)


def test_the_rank_that_sends_the_long_piece_is_the_busiest_of_two() -> None:
    # 4810 elements in blocks of 2048 are cut after the second block. Rank 0 sends the 714 elements that rank 1 adds,
    # rank 1 the 4096 that rank 0 adds; then each the mean of its piece, the shorter filled up to the longer's size.
    card = explain(LocalSGD(2, codec=thinwire.Quantize(4)), parameters=digits(), workers=2, bits_per_second=1e6)
    long, short = 4096 // 2 + 2 * 4 + 16, 720 // 2 + 4 + 16
    assert (card.rank, card.sent_bytes_per_step) == (1, (long + long) / 2)
    assert (card.received_bytes_per_step, card.largest_message_bytes) == ((short + long) / 2, long)
    assert card.mean_sent_bytes_per_step == (3 * long + short) / 4


def every_rank(strategy: Strategy, sizes: list[int], workers: int) -> tuple[Looks, list[float], list[int]]:
    """What was looked at, what each rank sends a step, and the ranks that were run for the former."""
    ran: list[int] = []

    def dry(rank: int) -> DryRun:
        ran.append(rank)
        return DryRun(strategy, sizes, workers=workers, rank=rank, dtype=torch.float32, bucket_bytes=1 << 14)

    found, looked_at = look_at_ranks(dry, strategy, workers), len(ran)
    periods = [dry(rank).period() for rank in range(workers)]
    return found, [sum(step.sent for step in each) / len(each) for each in periods], ran[:looked_at]


@pytest.mark.parametrize(
    ("recipe", "workers"),
    [
        ("AllReduce", 12),
        ("AllReduce(Quantize(4, 2048))", 6),
        ("LocalSGD(2, weights='samples')", 3),
        ("LocalSGD(1, codec=BetweenNodes(Quantize(4, 512), node_size=2))", 4),
        *(
            pytest.param(recipe, workers, marks=pytest.mark.slow)
            for recipe, workers in (
                ("AllReduce(Quantize(4, 64))", 12),
                ("AllReduce(Quantize(4, 2048))", 12),
                ("LocalSGD(3, codec=BetweenNodes(Quantize(4, 512), node_size=3))", 6),
                ("LocalSGD(3, codec=BetweenNodes(Quantize(4, 512), node_size=3))", 12),
                ("LocalSGD(2, codec=BetweenNodes(ErrorFeedback(OneBit), node_size=2))", 8),
            )
        ),
        ("SlowMo(PushSum, period=2)", 3),
    ],
)
@pytest.mark.slow
def test_the_ranks_that_are_looked_at_stand_for_all(recipe: str, workers: int) -> None:
    strategy = parse(recipe)
    assert isinstance(strategy, Strategy)
    found, sent, ran = every_rank(strategy, [5000, 301, 2999], workers)
    assert found.busiest.sent == pytest.approx(max(sent), rel=0, abs=1e-6)
    assert found.mean_sent == pytest.approx(sum(sent) / workers, rel=0, abs=1e-6)
    assert len(ran) == len(set(ran))
    if recipe == "AllReduce":
        assert ran == [0, 11]


@dataclass(frozen=True)
class Wheel(Topology):
    """A ring, whose ranks all exchange with rank 2 besides."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        near = {(rank + 1) % size, (rank - 1) % size, 2}
        others = tuple(sorted((near if rank != 2 else set(range(size))) - {rank}))
        return Peers(others, others, 1 - len(others) / size, (1 / size,) * len(others))


def test_in_an_irregular_graph_the_mean_is_over_its_kinds_of_ranks() -> None:
    found, sent, ran = every_rank(Gossip(Wheel()), [100], 9)
    assert (found.busiest.rank, found.busiest.sent) == (2, 8 * 400)
    assert found.mean_sent == pytest.approx(sum(sent) / 9)
    assert len(ran) < 9
    regular, *_ = every_rank(Gossip(Ring()), [100], 9)
    assert (regular.busiest.rank, regular.mean_sent) == (0, 800)


@dataclass(frozen=True)
class Stairs(Topology):
    """Rank i exchanges with all below `size - i`: as many kinds of ranks as there are ranks, nearly."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        others = tuple(other for other in range(size - rank) if other != rank)
        return Peers(others, others, 1 - len(others) / size, (1 / size,) * len(others))


@pytest.mark.slow
def test_in_a_graph_of_too_many_kinds_of_ranks_the_busiest_alone_is_run() -> None:
    found, sent, ran = every_rank(Gossip(Stairs()), [10], 40)
    assert (found.busiest.rank, found.busiest.sent, found.mean_sent, ran) == (0, max(sent), None, [0])


def lines(capsys: pytest.CaptureFixture[str], recipe: str, workers: int) -> str:
    assert main(["explain", recipe, "--task", "digits", "--workers", str(workers)]) == 0
    return capsys.readouterr().out


def test_the_command_names_the_busiest_and_tells_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    out = lines(capsys, "LocalSGD(period=2, codec=Quantize(4))", 2)
    assert "Rank 1, the busiest: traffic" in out
    assert "sent        2.07 kB a step, 1.23 kB received" in out
    assert "mean        1.65 kB a step, over all 2 workers" in out
    out = lines(capsys, "LocalSGD(period=2)", 2)
    assert "One worker: traffic" in out
    assert "mean " not in out


def test_memory_and_seconds_are_those_of_the_worker_that_has_most() -> None:
    def card(workers: int) -> Card:
        recipe = parse("AllReduce(ErrorFeedback(OneBit))")
        assert isinstance(recipe, Strategy)
        return explain(recipe, parameters=[4810], workers=workers, bits_per_second=8e6)

    # The rank that sends most adds the shortest piece, and keeps the shortest residual; rank 0's is of two blocks.
    (residual,) = (v for k, v in card(2).memory_bytes_per_parameter.items() if k.startswith("server_error"))
    assert residual == pytest.approx(4 * 4096 / 4810)
    # Of four ranks the last adds nothing, so that it sends most; rank 0 receives most, in three pieces of a block.
    busiest = card(4)
    assert busiest.rank == 3
    assert busiest.seconds_per_step is not None
    assert busiest.seconds_per_step * 1e6 > max(busiest.sent_bytes_per_step, busiest.received_bytes_per_step)


def test_a_push_sum_of_equals_is_shown_as_one_worker() -> None:
    card = explain(PushSum(), parameters=1000, workers=4)
    assert card.rank == 0
    assert card.mean_sent_bytes_per_step == card.sent_bytes_per_step == 4000
