# SPDX-License-Identifier: Apache-2.0
"""`explain` tells, to the byte, what a real run sends.

tests/battery compares dry runs of every strategy with real runs, where bytes depend neither on numbers nor on timing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

import thinwire
from thinwire import (
    ADPSGD,
    DQSGD,
    AllReduce,
    AsyncLeaderSGD,
    BackupWorkers,
    Bf16,
    BipartiteExponential,
    BitBudget,
    Budget,
    Comm,
    CompressedMomentum,
    DiLoCo,
    EagerPushSum,
    ErrorBound,
    ErrorFeedback,
    FetchSGD,
    FixedBits,
    LeaderSGD,
    LocalSGD,
    MultiLeaderSGD,
    Nearest,
    NodeAverage,
    OneBit,
    OneBitAdam,
    OneBitLamb,
    OverlapLocalSGD,
    Paced,
    ParameterServer,
    PushSum,
    Quantize,
    Sharded,
    SketchedSGD,
    SlowMo,
    Strategy,
    Streaming,
    TopK,
    ZeroOne,
    ZeroOneAdam,
)
from thinwire.planning.plan import Card, explain
from thinwire.planning.plan.traffic import MakeOptimizer

BUCKET_BYTES = 1 << 14


class Perceptron(nn.Module):
    """Large matrices beside small vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(40, 150), nn.Tanh(), nn.LayerNorm(150), nn.Linear(150, 7))

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers(batch.view(len(batch), 40)).square().mean()


class Tied(nn.Module):
    """A convolution whose weights are used twice, a frozen tensor, a scalar and tensors of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 13, 3, padding=1)
        self.again = nn.Conv2d(1, 13, 3, padding=1)
        self.again.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.last = nn.Linear(13 * 40, 11)

    def forward(self, batch: Tensor) -> Tensor:
        images = batch.view(len(batch), 1, 5, 8)
        both = torch.tanh(self.first(images)) + torch.tanh(self.again(images * self.scale))
        return F.cross_entropy(self.last(both.flatten(1)), torch.zeros(len(batch), dtype=torch.int64))


@dataclass(frozen=True)
class Case:
    """A recipe, with an optimizer where plain SGD is not what it is used with."""

    strategy: Strategy
    optimizer: MakeOptimizer | None = None

    def __str__(self) -> str:
        return str(self.strategy)


def adam(parameters: list[nn.Parameter]) -> AdamW:
    return AdamW(parameters, lr=1e-3)


def sgd(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=1e-3)


def one_bit_adam(parameters: list[nn.Parameter]) -> OneBitAdam:
    return OneBitAdam(parameters, lr=1e-3)


def one_bit_lamb(parameters: list[nn.Parameter]) -> OneBitLamb:
    return OneBitLamb(parameters, lr=1e-3)


def quick_adam(parameters: list[nn.Parameter]) -> OneBitAdam:
    return OneBitAdam(parameters, lr=1e-3, betas=(0.8, 0.9))


def zero_one_adam(parameters: list[nn.Parameter]) -> ZeroOneAdam:
    return ZeroOneAdam(parameters, lr=1e-3)


# Of each kind of traffic one, those whose traffic depends on numbers or on timing, and those that optimizers change.
FAST = [
    *(Case(AllReduce()), Case(LocalSGD(3, warmup_steps=2)), Case(PushSum()), Case(LeaderSGD(period=3))),
    Case(CompressedMomentum(warmup_steps=3), one_bit_adam),
    Case(SketchedSGD(fraction=0.01)),
    *(Case(Sharded(SlowMo(period=3))), Case(Streaming(OverlapLocalSGD(4), fragments=3))),
    *(Case(ADPSGD(BipartiteExponential())), Case(AsyncLeaderSGD(period=4)), Case(BackupWorkers(backups=0))),
    *(Case(EagerPushSum()), Case(ParameterServer())),
]
CODED = [
    *(Case(AllReduce(Bf16())), Case(DiLoCo(period=4, codec=Quantize(4)))),
    Case(Budget(AllReduce(ErrorFeedback(Nearest(block=8))), "1MB/step")),
]
SLOW = [
    *(Case(AllReduce(ErrorFeedback(OneBit()))), Case(BackupWorkers(backups=1))),
    Case(CompressedMomentum(warmup_steps=3), one_bit_lamb),
    Case(CompressedMomentum(warmup_steps=3, overlap=True), one_bit_adam),
    Case(CompressedMomentum(warmup_steps=None), quick_adam),
    Case(ZeroOne(variance_steps=6, variance_doubling=2, local_doubling=2, most_local=4), zero_one_adam),
    *(Case(DQSGD(FixedBits(3))), Case(DQSGD(BitBudget(bits=4.0, steps=20)))),
    Case(DQSGD(ErrorBound(error=1e-6, steps=20))),
    *(Case(FetchSGD(fraction=0.01)), Case(FetchSGD(fraction=0.01, conserving=False))),
    Case(MultiLeaderSGD(period=2, node_size=2, global_period=4)),
    *(Case(LocalSGD(3, weights="samples")), Case(LocalSGD(3, codec=ErrorFeedback(TopK(0.1))))),
    Case(SketchedSGD(fraction=0.01, recovery="sketch", dense_below=0)),
    Case(SketchedSGD(fraction=0.01, recovery="gather", dense_below=10**6)),
    *(Case(SlowMo(LocalSGD(2), period=4, buffers="average"), adam), Case(SlowMo(SketchedSGD(fraction=0.01), period=3))),
    Case(DiLoCo(period=4, fragments=2, delay=3, mixing=0.5, codec=ErrorFeedback(OneBit()))),
    Case(DiLoCo(period=4, fragments=3, delay=1, mixing=0.5, weights="samples")),
    *(Case(Paced(LocalSGD(4), steps=(4,))), Case(NodeAverage(SlowMo(period=4), period=2))),
    Case(Budget(LocalSGD(4, codec=ErrorFeedback(Nearest(block=8))), "400B/step")),
]


def settings() -> list[Any]:
    fast = [*((case, 4, Perceptron) for case in FAST), *((case, 2, Tied) for case in CODED)]
    ways = product((*FAST, *CODED, *SLOW), (2, 4), (Tied, Perceptron))
    every = [each for each in ways if each not in fast]
    return [*fast, *(pytest.param(*each, marks=pytest.mark.slow) for each in every)]


def steps_of(case: Case, card: Card) -> tuple[int, int]:
    """How many steps are run before those that are counted, and how many of these: whole periods."""
    # Two periods more, until messages that are used later are in flight; up to just before a period's end, so that all
    # that follows from one election is counted or not.
    return case.strategy.traits.steady_from + 2 * card.period - 1, card.period * -(-6 // card.period)


def train_and_count(
    comm: Comm, case: Case, make_model: Callable[[], nn.Module], steps: tuple[int, int]
) -> tuple[float, float]:
    """Bytes sent in the counted steps; and in these, in the steps before and in ending the run together."""
    draws = torch.Generator().manual_seed(comm.rank)
    model = make_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 10)
    optimizer = (case.optimizer or sgd)([p for p in model.parameters() if p.requires_grad])
    worker = thinwire.attach(model, optimizer, case.strategy, comm=comm, bucket_bytes=BUCKET_BYTES)
    start = before = comm.meter.payload_bytes
    while worker.step < sum(steps):
        if worker.step == steps[0]:
            before = comm.meter.payload_bytes
        optimizer.zero_grad()
        loss = model(torch.randn(4, 40, generator=draws))
        worker.record_batch(4, loss=loss)
        loss.backward()
        optimizer.step()
    counted = comm.meter.payload_bytes - before
    worker.detach()
    return counted, comm.meter.payload_bytes - start


@pytest.mark.parametrize(("case", "n", "make_model"), settings(), ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_real_run_sends_what_explain_says(case: Case, n: int, make_model: Callable[[], nn.Module]) -> None:
    card = explain(
        case.strategy, parameters=make_model(), workers=n, optimizer=case.optimizer, bucket_bytes=BUCKET_BYTES
    )
    steps = steps_of(case, card)
    counts = thinwire.run_threads(n, lambda comm: train_and_count(comm, case, make_model, steps))
    counted, total = counts[card.rank]
    expected, least = card.sent_bytes_per_step * steps[1], card.least_sent_bytes_per_step * steps[1]
    if case.strategy.traits.timing_dependent:
        check_what_timing_leaves(case.strategy, card, [each[1] for each in counts], sum(steps))
    elif case.strategy.traits.data_dependent_bytes:
        assert least < expected or n == 2
        assert least - 1e-3 <= counted <= expected + 1e-3
    else:
        assert least == expected
        assert counted == pytest.approx(expected, rel=0, abs=1e-3)
        assert total >= counted


def check_what_timing_leaves(strategy: Strategy, card: Card, totals: list[float], steps: int) -> None:
    """What can be promised of a whole run whose messages depend on timing.

    Args:
        strategy: the recipe.
        card: of the busiest rank.
        totals: what each rank has sent, the end of the run together with the others included.
        steps: that each rank has taken.
    """
    n, vector, told, sent = len(totals), 4 * card.parameters, steps * card.sent_bytes_per_step, totals[card.rank]
    if isinstance(strategy, EagerPushSum):
        # It only depends on timing when a message is used.
        assert sent == told
    elif isinstance(strategy, ParameterServer):
        # Every update is pushed and answered before the barrier at the end, which is a number to each other rank.
        assert sent == told + 8 * (n - 1)
    elif isinstance(strategy, ADPSGD):
        # A worker that waits for an answer sends no request, so that there may be fewer exchanges and never more.
        assert sum(totals) <= n * told + 8 * n * n
        assert sum(totals) >= n * vector
    elif isinstance(strategy, AsyncLeaderSGD):
        # The steps of a run make up so many rounds, whoever takes them; at the end ranks ask and are answered.
        rounds = steps // strategy.period
        assert sent <= told + 8 * (n - 1) * 2 * (rounds + 1)
        assert sent >= 2 * 4 * steps * (n - 1) * (card.rank == 0)
    elif isinstance(strategy, BackupWorkers) and not strategy.backups:
        assert sent == pytest.approx(told)
    else:
        # Each step has as many members, who send what an all-reduce among them does; a late rank's state comes on top.
        assert isinstance(strategy, BackupWorkers)
        members = n - strategy.backups
        assert card.sent_bytes_per_step == pytest.approx(2 * (members - 1) / members * vector, abs=2000)
        assert sum(totals) >= steps * 2 * (members - 1) * vector
