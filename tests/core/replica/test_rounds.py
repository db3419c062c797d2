# SPDX-License-Identifier: Apache-2.0
"""Barriers by messages, and rounds with a budget of steps, in any order of events and without waiting."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from thinwire import CommTimeoutError, Replica
from thinwire.core.comm.threads import Hub, ThreadComm, run_threads
from thinwire.core.replica.point_to_point import on_message, open_mailbox, others
from thinwire.core.replica.rounds import Answers, Barrier, GoOn, RoundBudget

# -- rounds with a budget ---------------------------------------------------------------------------------------------


class Workers:
    """Workers that train, wait at a barrier, and elect together at the end of a round; rank 0's counters decide."""

    def __init__(self, size: int, budget: int) -> None:
        self.rounds, self.size, self.budget = RoundBudget.of(budget, size), size, budget
        self.phase = ["training"] * size
        self.round, self.steps, self.releases = 0, Counter[int](), 0
        self.at_barrier = set[int]()

    def moves(self) -> list[Callable[[], None]]:
        if all(phase == "electing" for phase in self.phase):
            return [self.elect]
        moves: list[Callable[[], None]] = []
        for rank, phase in enumerate(self.phase):
            # Messages to a rank 0 that is paused are deferred.
            if phase == "training" and (rank == 0 or not self.rounds.paused):
                moves.append(lambda rank=rank: self.step(rank))
            if phase == "training" and not self.rounds.paused:
                moves.append(lambda rank=rank: self.arrive(rank))
        return moves

    def step(self, rank: int) -> None:
        if rank == 0:
            self.rounds.resume()
        self.steps[self.round] += 1
        self.answer(self.rounds.add_step(self.round))
        assert self.rounds.steps(self.round) == self.steps[self.round], "every step counts once"
        if self.rounds.steps(self.round) >= self.budget:
            self.enter_election(rank)

    def arrive(self, rank: int) -> None:
        self.phase[rank] = "waiting"
        self.at_barrier.add(rank)
        self.answer(self.rounds.arrive(rank, self.round))

    def answer(self, answers: Answers) -> None:
        for rank, reason in answers:
            assert self.phase[rank] == "waiting", "a rank goes on once"
            if reason is GoOn.ROUND_OVER:
                assert self.steps[self.round] >= self.budget
                self.enter_election(rank)
            else:
                assert sorted(rank for rank, _ in answers) == list(range(self.size)), "nobody trains any more"
                self.phase[rank] = "training"
        if answers and answers[0][1] is GoOn.ALL_HERE:
            self.at_barrier.clear()
            self.releases += 1

    def enter_election(self, rank: int) -> None:
        if rank == 0:
            self.rounds.begin_next(self.round)
        self.phase[rank] = "electing"

    def elect(self) -> None:
        self.round += 1
        for rank in range(self.size):
            self.phase[rank] = "training"
        for rank in sorted(self.at_barrier):
            self.arrive(rank)


@settings(max_examples=150, deadline=None)
@given(size=some.integers(2, 5), budget=some.integers(1, 9), choices=some.lists(some.integers(0, 10**6), max_size=150))
@pytest.mark.slow
def test_a_round_has_its_budget_and_ranks_at_the_barrier_go_on_once(size: int, budget: int, choices: list[int]) -> None:
    workers = Workers(size, budget)
    for choice in choices:
        moves = workers.moves()
        assert moves, "somebody can always go on"
        moves[choice % len(moves)]()
        assert workers.rounds.missing() == (
            [rank for rank, phase in enumerate(workers.phase) if phase != "waiting"]
            if workers.phase[0] == "waiting"
            else []
        )
    for number in range(workers.round):
        assert budget <= workers.steps[number] <= budget + size - 1
    # From anywhere, all ranks can come to the barrier and leave it together.
    before = workers.releases
    for _ in range(10 * (size + budget)):
        moves = workers.moves()
        moves[-1]()
    assert workers.releases > before


def test_nothing_is_counted_before_the_first_step_of_the_rank_that_counts() -> None:
    rounds = RoundBudget.of(4, ranks=3)
    assert rounds.paused
    rounds.resume()
    assert [rounds.arrive(rank, 0) for rank in (2, 0)] == [[], []]
    assert (rounds.paused, rounds.missing()) == (False, [1])
    assert rounds.arrive(1, 0) == [(rank, GoOn.ALL_HERE) for rank in range(3)]
    assert (rounds.paused, rounds.missing()) == (True, [])


# -- barriers ---------------------------------------------------------------------------------------------------------

BARRIER = Barrier("met", topic=3, until="to meet")


def replicas(size: int) -> list[Replica]:
    def begin(comm: ThreadComm) -> Replica:
        r = Replica(torch.zeros(2), torch.empty(0), comm, lr=lambda: 0.0)
        open_mailbox(r, r.x)
        BARRIER.open(r, others(r))
        return r

    return run_threads(size, begin, timeout=20)


def test_a_barrier_names_the_ranks_that_did_not_come_and_measures_by_the_mailbox_s_clock() -> None:
    first, second, *_ = replicas(4)
    BARRIER.reach(second, 1, dst=others(second))
    times = iter((1e12, 1e12 + 100, 2e12))  # no real clock is so late
    first.comm.mailbox(first).clock = lambda: next(times)
    with pytest.raises(CommTimeoutError, match="rank 0 waited 20 s for ranks 2, 3 to meet at step 0"):
        BARRIER.wait(first, 1, src=others(first))
    BARRIER.wait(first, 1, src=[1])


def test_a_rank_that_is_further_has_reached_what_was_before() -> None:
    first, second = replicas(2)
    BARRIER.reach(second, 3, dst=[0])
    assert [BARRIER.reached(first, 1, count) for count in (2, 3, 4)] == [True, True, False]
    BARRIER.wait(first, 2, src=[1])


def test_a_wait_does_meanwhile_what_is_due_and_ends_when_that_was_all() -> None:
    (first,) = run_threads(
        1, lambda comm: open_mailbox(Replica(torch.zeros(1), torch.empty(0), comm, lr=lambda: 0.0), torch.zeros(1))
    )
    left = [2, 1, 0]

    def meanwhile() -> float:
        left.pop(0)
        return 0.001

    with first.changed:
        first.wait_until(lambda: [0] if left else [], "nothing", meanwhile=meanwhile)
    assert left == []


def test_a_handler_does_not_keep_its_replica_alive() -> None:
    comm = ThreadComm(Hub(1), 0)
    r = Replica(torch.zeros(1), torch.empty(0), comm, lr=lambda: 0.0)
    box = open_mailbox(r, torch.zeros(1))
    on_message(r, 1, lambda r, box, message: True, like=torch.zeros(1), src=[])
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(r)
        del r
        assert held() is None, "no cycle holds the replica"
        assert box.capacity == 4
    finally:
        gc.enable()
