# SPDX-License-Identifier: Apache-2.0
"""Push-sum between real processes: the same numbers, with messages in flight, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire
from tests.engine import Mixed, attach, batches, drawn, steps
from tests.oracles import common as oracles
from tests.oracles.common import Descent, Mixing
from tests.oracles.push_sum import overlap_push_sum
from tests.pool import run_processes
from tests.problems import Irregular, Regression, distance, flat, train
from thinwire import Comm, OnePeerExponential, PushSum, SlowMo

DOUBLE = torch.float64
RATES = [0.02] * 24
HEAVY = {"momentum": 0.9, "weight_decay": 0.01}
STRATEGIES = [
    PushSum(staleness=1),
    PushSum(Irregular(), 1),
    PushSum(staleness=3),
    PushSum(Irregular(), 3),
    PushSum(Irregular(), 2, biased=True),
]


def ends(comm: Comm, dtype: torch.dtype) -> list[list[float]]:
    """The final parameters of every strategy on this rank."""
    problem = Regression(comm.size, len(RATES), dtype)
    return [flat(train(comm, strategy, problem, RATES, **HEAVY).model).tolist() for strategy in STRATEGIES]


def two_precisions(comm: Comm) -> list[float]:
    """A model of two precisions, with averages in between that must not change messages in flight."""
    strategy = SlowMo(PushSum(Irregular(), 2), period=4)
    worker = steps(attach(comm, strategy, model=drawn(Mixed())), batches(comm.rank, 8))
    assert not any(r.inflight for r in worker.replicas)
    worker.detach()
    return torch.cat([p.detach().double().reshape(-1) for p in worker.model.parameters()]).tolist()


def train_all() -> tuple[list[list[float]], list[list[float]], list[float]]:
    """On five processes, five workers and then four of them."""
    group = dist.new_group([0, 1, 2, 3])
    comm = thinwire.GroupComm()
    five, mixed = ends(comm, DOUBLE), two_precisions(comm)
    return five, ends(thinwire.GroupComm(group), torch.float32) if dist.get_rank() < 4 else [], mixed


@pytest.mark.slow  # threads are asked always, and tests/battery/test_processes.py has the strategy on processes
def test_overlap_equals_its_oracle_on_five_processes_and_on_four() -> None:
    rows = run_processes(5, train_all)
    compare([five for five, _, _ in rows], DOUBLE, 1e-12)
    compare([four for _, four, _ in rows[:4]], torch.float32, 1e-5)
    assert all(mixed == rows[0][2] for _, _, mixed in rows)


def compare(rows: list[list[list[float]]], dtype: torch.dtype, tolerance: float) -> None:
    """Compare the processes' final parameters, by rank and strategy, with the oracle."""
    n = len(rows)
    problem = Regression(n, len(RATES), dtype)
    mixings: dict[Any, Mixing] = {
        OnePeerExponential(): oracles.one_peer(n, dtype),
        Irregular(): oracles.irregular(n, dtype),
    }
    for i, strategy in enumerate(STRATEGIES):
        wanted = overlap_push_sum(
            problem.gradient,
            problem.start.expand(n, -1),
            Descent(RATES, momentum=0.9, decay=0.01),
            len(RATES),
            mixing=mixings[strategy.topology],
            staleness=strategy.staleness,
            biased=strategy.biased,
        )
        assert distance(torch.tensor([row[i] for row in rows], dtype=dtype), wanted) < tolerance, strategy


def save_and_continue(folder: Path) -> tuple[bool, bool, int]:
    """Whether a resumed run and one that continued end in the same bits as one that was never saved."""
    comm = thinwire.GroupComm()
    plain = steps(attach(comm, PushSum(Irregular(), 2)), batches(comm.rank, 9))
    plain.detach()
    whole = steps(attach(comm, PushSum(Irregular(), 2)), batches(comm.rank, 4))
    whole.save(folder)
    flying = len(whole.replicas[0].inflight)
    steps(whole, batches(comm.rank, 5, 4))
    whole.detach()
    again = attach(comm, PushSum(Irregular(), 2))
    again.load(folder)
    steps(again, batches(comm.rank, 5, 4))
    again.detach()
    wanted = flat(plain.model)
    return torch.equal(flat(whole.model), wanted), torch.equal(flat(again.model), wanted), flying


@pytest.mark.parametrize("n", [3])
def test_a_checkpoint_holds_what_is_in_flight_between_processes(n: int, tmp_path: Path) -> None:
    assert run_processes(n, save_and_continue, tmp_path) == [(True, True, 2)] * n
