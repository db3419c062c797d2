# SPDX-License-Identifier: Apache-2.0
"""The coordinator: which ranks are members of a step, what happens when some stop, and how long it waits."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import torch

from tests.asynchronous.quorum.simulation import Simulation
from tests.grids import fast_where
from thinwire.asynchronous.quorum.coordinator import Coordinator
from thinwire.asynchronous.quorum.messages import ControlMessage, Kind, control_length, decode_control
from thinwire.asynchronous.quorum.rules import QuorumRule, best_number, deadline, order_statistics


def ready(step: int, *, attempt: int = 0, digest: int = 0, seconds: float = 0.0) -> ControlMessage:
    return ControlMessage(Kind.READY, step, attempt, digest=digest, microseconds=int(1e6 * seconds))


def run_step(coordinator: Coordinator, ranks: list[int], now: float = 0.0) -> tuple[int, ...]:
    """Ranks are ready in this order, and all members acknowledge the mean; returns the members."""
    step, outbox = coordinator.step, []
    for rank in ranks:
        for dst, message in coordinator.receive(rank, ready(step), now):
            if message.kind is Kind.START:
                outbox += coordinator.receive(dst, ControlMessage(Kind.ACK, step, message.attempt), now)
    return next(message.members for _, message in outbox)


# -- the coordinator -------------------------------------------------------------------------------------------------


def test_the_first_ranks_to_be_ready_are_members_and_others_are_late() -> None:
    coordinator = Coordinator(QuorumRule(4, 3))
    assert run_step(coordinator, [2, 0, 3]) == (0, 2, 3)
    assert coordinator.receive(1, ready(0), 0.0) == [(1, ControlMessage(Kind.LATE, 1, answers=0, members=(0, 2, 3)))]


def test_a_rank_that_is_ready_during_a_reduction_learns_of_the_commit() -> None:
    coordinator = Coordinator(QuorumRule(3, 2))
    coordinator.receive(0, ready(0), 0.0)
    coordinator.receive(1, ready(0), 0.0)
    assert coordinator.receive(2, ready(0), 0.0) == []
    coordinator.receive(0, ControlMessage(Kind.ACK, 0, 1), 0.0)
    outbox = coordinator.receive(1, ControlMessage(Kind.ACK, 0, 1), 0.0)
    assert {(dst, message.kind, message.members) for dst, message in outbox} == {
        (rank, Kind.COMMIT, (0, 1)) for rank in range(3)
    }


def test_a_stopped_member_is_left_out_of_the_next_attempt_and_is_late() -> None:
    coordinator = Coordinator(QuorumRule(3, 2))
    coordinator.receive(0, ready(0), 0.0)
    coordinator.receive(1, ready(0), 0.0)
    coordinator.receive(2, ready(0), 0.0)
    assert coordinator.receive(0, ready(0, attempt=1), 1.0) == []
    again = coordinator.receive(0, ready(0, attempt=1), 2.0)
    assert again == [(rank, ControlMessage(Kind.START, 0, 2, members=(0, 2))) for rank in (0, 2)]
    for rank in range(3):
        assert coordinator.receive(rank, ControlMessage(Kind.ACK, 0, 1), 2.0) == []
    coordinator.receive(0, ControlMessage(Kind.ACK, 0, 2), 2.0)
    coordinator.receive(2, ControlMessage(Kind.ACK, 0, 2), 2.0)
    assert coordinator.receive(1, ready(0), 3.0)[0][1].kind is Kind.LATE


def test_members_that_all_wait_are_given_all_the_time_they_need() -> None:
    coordinator = Coordinator(QuorumRule(3, 2))
    for now in range(20):
        coordinator.receive(0, ready(0, attempt=1), now)
        coordinator.receive(1, ready(0, attempt=1), now)
    assert (coordinator.attempt, coordinator.members) == (1, (0, 1))


def test_a_member_that_holds_the_mean_is_not_taken_for_stopped() -> None:
    coordinator = Coordinator(QuorumRule(2, 2))
    coordinator.receive(0, ready(0), 0.0)
    coordinator.receive(1, ready(0), 0.0)
    coordinator.receive(1, ControlMessage(Kind.ACK, 0, 1), 0.0)
    for now in range(5):
        assert coordinator.receive(0, ready(0, attempt=1), now) == []


@pytest.mark.parametrize("seed", fast_where(lambda seed: seed < 4, range(12)))
@pytest.mark.parametrize(("size", "least"), [(2, 1), (4, 3), (5, 3), (9, 7)])
def test_each_step_is_committed_once_with_the_same_members_on_all_ranks_whoever_stops(
    size: int, least: int, seed: int
) -> None:
    rng = random.Random(seed)
    simulation = Simulation(Coordinator(QuorumRule(size, least)), rng)
    for now in range(3000):
        if rng.random() < 0.02:
            simulation.stopped = set(rng.sample(range(size), rng.randint(0, size - least)))
        simulation.act(rng.randrange(size), now)
    stopped_at, simulation.stopped = simulation.coordinator.step, set()
    for now in range(3000, 5000):
        simulation.act(rng.randrange(size), now)
    assert simulation.coordinator.step > stopped_at + 5
    decided: dict[int, tuple[int, ...]] = {}
    for seen in simulation.committed.values():
        for step, members in seen.items():
            assert decided.setdefault(step, members) == members
    assert all(len(set(members)) >= least for members in decided.values())
    added = {(step, members) for step, _, members in simulation.reduced}
    assert all((step, members) in added for step, members in decided.items())


def test_ranks_whose_optimizers_differ_are_all_refused() -> None:
    coordinator = Coordinator(QuorumRule(3, 2))
    coordinator.receive(2, ready(0, digest=7), 0.0)
    outbox = coordinator.receive(0, ready(0, digest=8), 0.0)
    assert outbox == [(rank, ControlMessage(Kind.REFUSED, 0, members=(2, 0))) for rank in (2, 0)]


def test_a_control_message_is_decoded_as_it_was_encoded() -> None:
    message = ControlMessage(Kind.START, 2**40, 3, 2**32 - 1, 5, 2**39, (0, 69))
    assert decode_control(message.encode(70).tolist()) == message
    assert message.encode(70).numel() == control_length(70)


# -- stopped members ---------------------------------------------------------------------------------------------------


def in_progress(size: int, least: int) -> Coordinator:
    """A coordinator with the first `least` ranks as members of step 0, and all ranks ready."""
    coordinator = Coordinator(QuorumRule(size, least))
    for rank in range(size):
        coordinator.receive(rank, ready(0), 0.0)
    return coordinator


def test_a_stopped_member_is_left_out_once_most_members_have_sent_ready_again() -> None:
    coordinator = in_progress(5, 4)
    assert coordinator.receive(0, ready(0, attempt=1), 1.0) == []
    assert coordinator.receive(2, ready(0, attempt=1), 1.0) == []
    again = coordinator.receive(3, ready(0, attempt=1), 1.0)
    assert again == [(rank, ControlMessage(Kind.START, 0, 2, members=(0, 2, 3, 4))) for rank in (0, 2, 3, 4)]


def test_a_member_that_was_merely_slow_may_be_one_of_the_next_attempt() -> None:
    coordinator = Coordinator(QuorumRule(4, 3))
    for rank in range(3):
        coordinator.receive(rank, ready(0), 0.0)
    assert [coordinator.receive(rank, ready(0, attempt=1), 1.0) for rank in (0, 2)] == [[], []]
    assert (coordinator.members, list(coordinator.ready)) == ((), [0, 2])
    again = coordinator.receive(1, ready(0, attempt=1), 1.1)
    assert again == [(rank, ControlMessage(Kind.START, 0, 2, members=(0, 1, 2))) for rank in (0, 1, 2)]


def test_members_that_hold_the_mean_count_as_heard_from() -> None:
    coordinator = in_progress(4, 3)
    coordinator.receive(0, ControlMessage(Kind.ACK, 0, 1), 0.5)
    assert {message.members for _, message in coordinator.receive(1, ready(0, attempt=1), 1.0)} == {(0, 1, 3)}


def test_a_single_waiting_member_must_send_ready_again_twice() -> None:
    coordinator = in_progress(5, 3)
    assert coordinator.receive(1, ready(0, attempt=1), 1.0) == []
    assert {message.members for _, message in coordinator.receive(1, ready(0, attempt=1), 2.0)} == {(1, 3, 4)}


def test_a_rank_that_does_not_know_of_the_attempt_yet_does_not_count_as_waiting() -> None:
    coordinator = in_progress(4, 3)
    for now in range(6):
        for rank in range(3):
            assert coordinator.receive(rank, ready(0), now) == []
    assert (coordinator.attempt, coordinator.members, len(coordinator.reminders)) == (1, (0, 1, 2), 0)


def test_if_all_members_have_stopped_other_ranks_that_wait_count() -> None:
    coordinator = in_progress(2, 1)
    assert coordinator.members == (0,)
    for now in range(3):
        assert coordinator.receive(1, ready(0), now) == []
    assert coordinator.receive(1, ready(0), 3.0) == [(1, ControlMessage(Kind.START, 0, 2, members=(1,)))]
    coordinator = in_progress(4, 3)
    coordinator.receive(0, ready(0, attempt=1), 0.0)
    for now in range(9):
        assert coordinator.receive(3, ready(0), now) == []
    assert (coordinator.attempt, coordinator.members) == (1, (0, 1, 2))


def test_a_member_that_stops_before_it_acknowledges_what_it_has_sent_is_left_out_in_the_end() -> None:
    coordinator = in_progress(4, 3)
    for rank in (0, 1):
        coordinator.receive(rank, ControlMessage(Kind.ACK, 0, 1), 0.5)
    outboxes = [coordinator.receive(0, ready(0, attempt=1), now) for now in range(4)]
    assert outboxes[:3] == [[], [], []]
    assert {message.members for _, message in outboxes[3]} == {(0, 1, 3)}


def test_acknowledgements_from_before_a_checkpoint_was_loaded_do_not_count() -> None:
    coordinator = in_progress(3, 2)
    coordinator.receive(0, ControlMessage(Kind.ACK, 0, 1), 0.0)
    coordinator.begin(0)
    for rank in (0, 1):
        coordinator.receive(rank, ready(0), 0.0)
    coordinator.receive(1, ControlMessage(Kind.ACK, 0, 1), 0.0)
    assert coordinator.step == 0


# -- how long to wait ------------------------------------------------------------------------------------------------


def test_the_mean_time_of_the_nth_is_the_closed_form() -> None:
    size, number, shift, rate = 16, 14, 1.0, 2.0
    rng = random.Random(0)
    seconds = [[shift + rng.expovariate(rate) for _ in range(20_000)] for _ in range(size)]
    harmonic = sum(1 / k for k in range(size - number + 1, size + 1))
    assert order_statistics(seconds)[number - 1] == pytest.approx(shift + harmonic / rate, rel=0.01)


def test_the_coordinator_waits_for_the_nth_rank_however_slow_the_slowest_is() -> None:
    rng = random.Random(1)
    for delay in (1.0, 10.0):
        times = []
        for _ in range(200):
            at = sorted((rng.random() + (delay if rank == 2 else 0), rank) for rank in range(4))
            coordinator = Coordinator(QuorumRule(4, 3))
            times.append(next(now for now, rank in at if coordinator.receive(rank, ready(0), now)))
        assert fmean(times) == pytest.approx(0.75, abs=0.05)


def test_the_number_with_the_most_gradients_per_second_is_found() -> None:
    assert best_number([[1.0], [1.0], [1.0], [10.0]]) == 3
    assert best_number([[1.0], [1.0], [1.0], [1.1]]) == 4
    assert best_number([[1.0], [9.0], [9.0], [9.0]], least=2) == 4


def test_a_deadline_is_not_moved_by_few_stragglers() -> None:
    assert deadline([1.0, 1.2, 0.8, 1.0, 1.4, 100.0], 3.0) == pytest.approx(1.7)
    assert deadline([1.0, 1.0, 1.0, 100.0], 3.0) == 1.25


def test_a_deadline_takes_all_ranks_that_are_ready_within_it() -> None:
    rule = QuorumRule(4, 2, "deadline", 2.0)
    for step in range(4):
        for rank in range(4):
            rule.record(rank, 1.0 + 0.4 * (step % 2))
    assert rule.seconds_to_wait(1, 9.0) is None
    assert rule.seconds_to_wait(2, 1.0) == pytest.approx(0.6)
    assert rule.seconds_to_wait(3, 1.7) == 0.0
    assert rule.seconds_to_wait(4, 0.1) == 0.0
    coordinator = Coordinator(rule)
    for rank, now in enumerate((11.2, 11.25, 11.3)):
        assert coordinator.receive(rank, ready(0, seconds=1.2), now) == []
    assert coordinator.seconds_to_wait(11.4) == pytest.approx(0.2)
    assert {message.members for _, message in coordinator.start_if_due(11.7)} == {(0, 1, 2)}


def test_the_mean_of_the_first_gradients_is_unbiased_with_the_noise_of_as_many() -> None:
    rng, size, least = torch.Generator().manual_seed(0), 6, 4
    gradients = 2.0 + 3.0 * torch.randn(4000, size, generator=rng, dtype=torch.float64)
    order = torch.rand(4000, size, generator=rng).argsort(1)
    coordinator = Coordinator(QuorumRule(size, least))
    arrivals = zip(gradients, order.tolist(), strict=True)
    means = torch.stack([row[list(run_step(coordinator, ranks))].mean() for row, ranks in arrivals])
    assert means.mean().item() == pytest.approx(2.0, abs=4 * 1.5 / 4000**0.5)
    assert means.var().item() == pytest.approx(9 / least, rel=0.1)


def test_where_delays_depend_on_the_data_the_mean_is_biased() -> None:
    rng, coordinator = torch.Generator().manual_seed(0), Coordinator(QuorumRule(4, 3))
    gradients = torch.randn(1000, 4, generator=rng, dtype=torch.float64)
    means = [row[list(run_step(coordinator, row.argsort().tolist()))].mean() for row in gradients]
    assert torch.stack(means).mean() < -0.2
