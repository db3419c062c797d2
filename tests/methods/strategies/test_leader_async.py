# SPDX-License-Identifier: Apache-2.0
"""Asynchronous leader SGD: how many steps a round has, and its barriers. The battery has its oracle."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.methods.strategies.leader_runs import DoubleWell, losses_of, starts_of
from tests.pool import run_processes
from tests.problems import begin, flat, go_on
from thinwire import Comm, CommTimeoutError, run_threads
from thinwire.asynchronous.async_leader import AsyncLeaderSGD
from thinwire.worker.worker import internals_of


def rounds_of(comm: Comm | None, steps: int, pauses: list[float], period: int) -> list[int]:
    """This rank's round after each of its steps, while ranks pause for different times."""
    problem = DoubleWell(0.1, 3)
    worker = begin(comm, AsyncLeaderSGD(period, pull=0.2), problem)
    found: list[int] = []
    for step in range(steps):
        time.sleep(pauses[worker.comm.rank])
        go_on(worker, problem, [0.01], step)
        found.append(int(worker.replicas[0].state["round"]))
    worker.detach()
    return found


def sizes_of(rounds: list[list[int]]) -> list[int]:
    """Steps of all ranks in each round that was ended by an election; a step counts where its round was open."""
    counts: dict[int, int] = {}
    for mine in rounds:
        before = 0
        for after in mine:
            counts[before] = counts.get(before, 0) + 1
            before = after
    last = max(max(mine) for mine in rounds)
    return [counts.get(number, 0) for number in range(last)]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_round_has_its_budget_of_steps_and_at_most_one_more_of_each_other_worker(n: int) -> None:
    period = 4
    pauses = [0.001 * (1 + 4 * (rank == n - 1)) for rank in range(n)]
    rounds = run_threads(n, lambda comm: rounds_of(comm, 30, pauses, period), timeout=20)
    for size in sizes_of(rounds):
        assert n * period <= size <= n * period + n - 1
    assert len(sizes_of(rounds)) >= 30 // (period + 1)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_worker_at_a_barrier_takes_part_in_the_elections_of_those_that_train(late: int) -> None:
    """All but one are through at once; its steps are enough for two rounds more."""
    problem, starts = DoubleWell(0.1, 3), starts_of(3, 3)

    def body(comm: Comm) -> tuple[int, Tensor]:
        worker = begin(comm, AsyncLeaderSGD(period=3, pull=0.5), problem, starts)
        for step in range(12):
            time.sleep(0.01 if comm.rank == late else 0)
            go_on(worker, problem, [0.05], step)
        with worker.consensus() as model:
            shipped = flat(model)
        return int(worker.replicas[0].state["round"]), shipped

    rows = run_threads(3, body, timeout=20)
    assert {rounds for rounds, _ in rows} == {rows[0][0]}
    assert rows[0][0] in (3, 4)
    assert all(torch.equal(shipped, rows[0][1]) for _, shipped in rows)


def at_their_own_pace(comm: Comm | None, paces: list[list[int]]) -> tuple[int, list[list[float]]]:
    """The rounds there were, and what was shipped each time after every rank had taken so many steps."""
    problem, shipped = DoubleWell(0.1, 3), list[list[float]]()
    worker = begin(comm, AsyncLeaderSGD(period=3, pull=0.5), problem, starts_of(3, 3))
    for steps in paces:
        go_on(worker, problem, [0.05] * steps[worker.comm.rank])
        with worker.consensus() as model:
            shipped.append(flat(model).tolist())
    worker.detach()
    return int(worker.replicas[0].state["round"]), shipped


UNEVEN = [[14, 4, 1], [1, 2, 12]]  # 34 steps: three rounds of 9 to 11


def check_uneven(rows: list[tuple[int, list[list[float]]]]) -> None:
    assert [rounds for rounds, _ in rows] == [3, 3, 3]
    assert all(shipped == rows[0][1] for _, shipped in rows)


def uneven_processes() -> tuple[int, list[list[float]]]:
    return at_their_own_pace(None, UNEVEN)


def test_between_two_barriers_processes_may_take_different_numbers_of_steps() -> None:
    check_uneven(run_processes(3, uneven_processes))


def test_a_worker_that_never_reaches_the_barrier_is_waited_for_until_the_timeout() -> None:
    problem = DoubleWell(0.1, 3)

    def body(comm: Comm) -> str:
        worker = begin(comm, AsyncLeaderSGD(period=3), problem)
        go_on(worker, problem, [0.05])
        if comm.rank == 1:
            time.sleep(0.8)
            return ""
        with pytest.raises(CommTimeoutError) as late:
            internals_of(worker).wait_pending()
        return str(late.value)

    words = run_threads(2, body, timeout=0.3)[0]
    assert "rank 0 waited 0.3 s for rank 1 to reach the barrier at step 1" in words


def test_rank_zero_may_still_be_reading_a_checkpoint_when_others_have_taken_a_step() -> None:
    problem = DoubleWell(0.1, 3)

    def body(comm: Comm) -> int:
        worker = begin(comm, AsyncLeaderSGD(period=3, pull=0.1), problem)
        saved = worker.state_dict(model=True, optimizer=True)
        if comm.rank == 0:
            time.sleep(0.1)
            worker.load_state_dict(saved)
        go_on(worker, problem, [0.05] * 3)
        worker.detach()
        return int(worker.replicas[0].state["round"])

    assert run_threads(2, body, timeout=20) == [1, 1]


@pytest.mark.parametrize("result", ["leader", "mean"])
def test_consensus_is_the_same_on_all_ranks(result: Any) -> None:
    problem, starts = DoubleWell(0.1, 3), starts_of(3, 3)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = begin(comm, AsyncLeaderSGD(period=8, result=result), problem, starts)
        go_on(worker, problem, [0.0] * 2)
        with worker.consensus() as model:
            return flat(model), worker.replicas[0].x.clone()

    rows = run_threads(3, body, timeout=20)
    best = starts[int(losses_of(problem)(starts, 0).argmin())]
    for shipped, _ in rows:
        assert torch.allclose(shipped, best if result == "leader" else starts.mean(0), rtol=0, atol=1e-15)
