# SPDX-License-Identifier: Apache-2.0
"""Payload bytes of dry runs equal the formulas of the docstrings; test_same_bytes.py compares them with real runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.oracles.common import irregular_targets
from tests.problems import Irregular
from tests.rules import for_each
from thinwire import (
    EASGD,
    AllReduce,
    AsyncLeaderSGD,
    Bf16,
    CoCoD,
    Complete,
    Fp16,
    Gossip,
    Hypercube,
    LeaderGradientDescent,
    LeaderSGD,
    Local,
    LocalSGD,
    MinibatchLocalSGD,
    OnePeerExponential,
    OverlapLocalSGD,
    ParameterServer,
    PushSum,
    Ring,
    SlowMo,
    Strategy,
)
from thinwire.planning.plan.traffic import DryRun

STEPS = 24
SIZES = [840, 1680]  # divisible by every number of workers up to 8, so that a share of a bucket is a whole number
ELEMENTS = sum(SIZES)

Formula = Callable[[int, int], float]
"""From the number of workers and the rank to the bytes of all steps, for elements of 4 bytes."""


def ring_share(n: int, elements: int = ELEMENTS, width: int = 4) -> float:
    """What each rank sends for an all-reduce."""
    return 2 * (n - 1) * elements * width / n


def leader(n: int) -> float:
    """What each rank sends for the losses of all and the leader's parameters."""
    return ring_share(n) / 2 + 8 * (n > 1)


def irregular(n: int, rank: int, elements: int) -> float:
    return sum(len(irregular_targets(rank, n, k)) for k in range(STEPS)) * 4 * elements


FORMULAS: list[tuple[Strategy, Formula]] = [
    (AllReduce(), lambda n, rank: STEPS * ring_share(n)),
    (AllReduce(Bf16()), lambda n, rank: STEPS * ring_share(n, width=2)),
    (AllReduce(Fp16()), lambda n, rank: STEPS * ring_share(n, width=2)),
    (Local(), lambda n, rank: 0),
    (LocalSGD(1), lambda n, rank: STEPS * ring_share(n)),
    (LocalSGD(8), lambda n, rank: 3 * ring_share(n)),
    (LocalSGD(7), lambda n, rank: 3 * ring_share(n)),
    (LocalSGD(25), lambda n, rank: 0),
    (EASGD(period=8), lambda n, rank: 3 * ring_share(n)),
    (OverlapLocalSGD(4), lambda n, rank: 6 * ring_share(n)),
    (CoCoD(4), lambda n, rank: 6 * ring_share(n)),
    (MinibatchLocalSGD(4), lambda n, rank: 6 * ring_share(n)),
    (ParameterServer(), lambda n, rank: STEPS * ring_share(n)),
    (LeaderSGD(period=8), lambda n, rank: 3 * leader(n)),
    (LeaderGradientDescent(), lambda n, rank: STEPS * leader(n)),
    (AsyncLeaderSGD(period=8), lambda n, rank: 3 * leader(n) + STEPS * 8 * (n > 1)),
    (Gossip(Ring()), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (Gossip(Ring(), "after"), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (Gossip(Complete()), lambda n, rank: STEPS * (n - 1) * 4 * ELEMENTS),
    (Gossip(OnePeerExponential(), "after"), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS),
    (PushSum(), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS),
    (PushSum(Ring()), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (PushSum(Irregular()), lambda n, rank: irregular(n, rank, ELEMENTS + 2 * (n > 1))),
    (SlowMo(period=12), lambda n, rank: 2 * ring_share(n)),
    (SlowMo(LocalSGD(6), period=6), lambda n, rank: 4 * ring_share(n)),
    (SlowMo(LocalSGD(3), period=6), lambda n, rank: 8 * ring_share(n)),
    (SlowMo(AllReduce(), period=12), lambda n, rank: STEPS * ring_share(n)),
    (SlowMo(PushSum(), period=6), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS + 4 * ring_share(n)),
    (SlowMo(Gossip(), period=5), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS + 4 * ring_share(n)),
    (
        SlowMo(PushSum(Irregular()), period=6),
        lambda n, rank: irregular(n, rank, ELEMENTS + 2) + 4 * ring_share(n),
    ),
]


@for_each(FORMULAS)
def test_a_dry_run_sends_exactly_the_bytes_of_the_formula(case: tuple[Strategy, Formula]) -> None:
    strategy, formula = case
    for n in (1, 2, 3, 8):
        for rank in range(n) if "Irregular" in repr(strategy) else [n - 1]:
            run = DryRun(strategy, SIZES, workers=n, rank=rank, dtype=torch.float32, bucket_bytes=1)
            steps = [run.step() for _ in range(STEPS)]
            assert run.comm.meter.payload_bytes == pytest.approx(formula(n, rank), rel=0, abs=0.01)
            assert sum(step.sent for step in steps) == pytest.approx(formula(n, rank), rel=0, abs=0.01)
            assert run.worker.replicas[0].x.is_meta


def test_a_vector_of_doubles_is_twice_the_bytes_and_half_precision_keeps_its_weight_exact() -> None:
    def sent(strategy: Strategy, dtype: torch.dtype) -> float:
        return DryRun(strategy, SIZES, workers=4, rank=0, dtype=dtype, bucket_bytes=1).step().sent

    assert sent(PushSum(), torch.float64) == 8 * ELEMENTS
    assert sent(PushSum(), torch.bfloat16) == 2 * ELEMENTS
    assert sent(PushSum(Irregular()), torch.float64) == 2 * 8 * (ELEMENTS + 1)
    assert sent(PushSum(Irregular()), torch.bfloat16) == 2 * 4 * (ELEMENTS + 2)


@for_each([2, 4, 8])
def test_a_hypercube_sends_to_one_partner_a_step(n: int) -> None:
    run = DryRun(Gossip(Hypercube()), SIZES, workers=n, rank=n - 1, dtype=torch.float32, bucket_bytes=1)
    steps = [run.step() for _ in range(n.bit_length() - 1)]
    assert sorted(peer for step in steps for each in step.exchanges for peer in each.dst) == sorted(
        (n - 1) ^ (1 << bit) for bit in range(n.bit_length() - 1)
    )
