# SPDX-License-Identifier: Apache-2.0
"""Payload bytes equal the formulas of the docstrings, to the byte, on threads and in dry runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.grids import fast_where
from tests.oracles.common import irregular_targets
from tests.problems import Irregular
from thinwire import (
    AllReduce,
    Bf16,
    Comm,
    Complete,
    CountingComm,
    Fp16,
    Gossip,
    Hypercube,
    Local,
    LocalSGD,
    OnePeerExponential,
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
    (Gossip(Ring()), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (Gossip(Ring(), "after"), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (Gossip(Complete()), lambda n, rank: STEPS * (n - 1) * 4 * ELEMENTS),
    (Gossip(OnePeerExponential(), "after"), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS),
    (PushSum(), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS),
    (PushSum(Ring()), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS),
    (PushSum(Irregular()), lambda n, rank: irregular(n, rank, ELEMENTS + 2 * (n > 1))),
    (SlowMo(period=12), lambda n, rank: 2 * ring_share(n)),
    (SlowMo(AllReduce(), period=12), lambda n, rank: STEPS * ring_share(n)),
    (SlowMo(PushSum(), period=6), lambda n, rank: STEPS * min(1, n - 1) * 4 * ELEMENTS + 4 * ring_share(n)),
    (SlowMo(Gossip(), period=5), lambda n, rank: STEPS * min(2, n - 1) * 4 * ELEMENTS + 4 * ring_share(n)),
    (
        SlowMo(PushSum(Irregular()), period=6),
        lambda n, rank: irregular(n, rank, ELEMENTS + 2) + 4 * ring_share(n),
    ),
]
CASES = pytest.mark.parametrize(("strategy", "formula"), FORMULAS, ids=[str(s) for s, _ in FORMULAS])
# Of each kind of traffic one.
ON_THREADS = pytest.mark.parametrize(
    ("strategy", "formula"),
    fast_where(lambda each: FORMULAS.index(each) in (1, 6, 9, 11, 14, 18, 19), FORMULAS),
    ids=[str(s) for s, _ in FORMULAS],
)


class Two(nn.Module):
    """Two parameters, so that their gradients travel in two messages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def forward(self) -> Tensor:
        return self.first.sum() * self.second.sum()


def train_and_count(comm: Comm, strategy: Strategy) -> float:
    """Bytes that 24 steps of a real loop send, without those of attaching."""
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm, bucket_bytes=1)
    before = comm.meter.payload_bytes
    for _ in range(STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    worker.detach()
    return comm.meter.payload_bytes - before


@ON_THREADS
@pytest.mark.parametrize("n", fast_where(lambda n: n == 3, [1, 3, 8]))
def test_a_real_loop_sends_exactly_the_bytes_of_the_formula(strategy: Strategy, formula: Formula, n: int) -> None:
    sent = thinwire.run_threads(n, lambda comm: train_and_count(comm, strategy))
    assert sent == pytest.approx([formula(n, rank) for rank in range(n)], rel=0, abs=0.01)


@CASES
def test_a_dry_run_sends_exactly_the_bytes_of_the_formula(strategy: Strategy, formula: Formula) -> None:
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


@pytest.mark.parametrize("n", [2, 4, 5])
def test_every_call_of_a_comm_counts_what_a_rank_sends(n: int) -> None:
    x = torch.zeros(840, device="meta")
    comm = CountingComm(0, n)
    comm.all_reduce_(x)
    comm.broadcast_(x, 0)
    comm.all_gather(x)
    comm.all_to_all([x[: 10 * j] for j in range(n)], [0] * n)
    comm.send_recv(x, range(1, n), [])
    assert comm.meter.by_operation == {
        "all_reduce": 2 * (n - 1) * 3360 / n,
        "broadcast": (n - 1) * 3360 / n,
        "all_gather": (n - 1) * 3360,
        "all_to_all": sum(40 * j for j in range(1, n)),
        "send_recv": (n - 1) * 3360,
    }
    assert comm.meter.payload_bytes == sum(comm.meter.by_operation.values())
    assert comm.meter.messages == 5
    assert x.nbytes == 3360


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_hypercube_sends_to_one_partner_a_step(n: int) -> None:
    run = DryRun(Gossip(Hypercube()), SIZES, workers=n, rank=n - 1, dtype=torch.float32, bucket_bytes=1)
    steps = [run.step() for _ in range(n.bit_length() - 1)]
    assert sorted(peer for step in steps for each in step.exchanges for peer in each.dst) == sorted(
        (n - 1) ^ (1 << bit) for bit in range(n.bit_length() - 1)
    )
