# SPDX-License-Identifier: Apache-2.0
"""One rank's decisions, and those of all ranks together in any order of events: late, twice, stopped or dead."""

from __future__ import annotations

import ast
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from tests.asynchronous.quorum.world import NUMEL, World, gradient_of, mean_of
from thinwire.asynchronous.quorum import member as member_module
from thinwire.asynchronous.quorum.member import Member, Send, SendState
from thinwire.asynchronous.quorum.messages import ControlMessage, GradientChunk, Kind, StateChunk
from thinwire.asynchronous.quorum.reductions import Partition
from thinwire.asynchronous.quorum.rules import Choice, QuorumRule

STEPS = 6


def run(world: World, choices: list[int]) -> World:
    """Anything may happen in the chosen order; then the ranks that live go on until all are through."""
    for choice in choices:
        world.do(choice)
    world.stopped.clear()
    rng = random.Random(len(choices))
    for _ in range(20_000):
        if world.has_ended():
            return world
        rng.choice(world.progress())[1]()
    raise AssertionError(f"no end: {[(rank.phase, len(rank.log)) for rank in world.ranks]}")


def check(world: World) -> None:
    living = [rank for number, rank in enumerate(world.ranks) if number not in world.dead]
    log = living[0].log
    assert len(log) == STEPS
    assert all(len(set(members)) >= world.rule.least for members in log)
    for rank in living:
        assert rank.log == log
        assert torch.equal(rank.x, living[0].x)
        assert set(rank.member.missing_at_barrier()) <= world.dead
    expected = torch.stack([mean_of(members, step) for step, members in enumerate(log)]).sum(0)
    assert torch.allclose(living[0].x, expected, rtol=0, atol=1e-12)
    # A gradient has counted if and only if its rank was told so.
    for number, rank in enumerate(world.ranks):
        for step, on_time in rank.verdicts.items():
            assert on_time == (number in log[step])
    for rank in world.ranks:
        assert rank.log == log[: len(rank.log)]
    for step, members in enumerate(log):
        assert {each for _, each in world.commits[step]} <= {members}
        assert len(world.commits[step]) <= 1


CHOICES: list[Choice] = ["fixed", "deadline"]


def world_of(sizes: tuple[int, int], coordinator: int, choice: Choice) -> World:
    return World(QuorumRule(*sizes, choice), coordinator=coordinator, steps=STEPS)


@given(
    sizes=some.sampled_from([(2, 1), (3, 2), (4, 3), (4, 2), (5, 3)]),
    coordinator=some.integers(0, 1),
    choice=some.sampled_from(CHOICES),
    choices=some.lists(some.integers(0, 10**6), max_size=250),
)
def test_in_any_order_of_events_each_step_closes_once_and_each_gradient_counts_once_or_is_known_to_be_late(
    sizes: tuple[int, int], coordinator: int, choice: Choice, choices: list[int]
) -> None:
    check(run(world_of(sizes, coordinator, choice), choices))


@pytest.mark.parametrize("choice", CHOICES)
def test_long_troubles_end_as_well(choice: Choice) -> None:
    seen = Counter[str]()
    for seed in range(8):
        rng = random.Random(seed)
        sizes = rng.choice([(3, 2), (4, 2), (5, 3)])
        world = world_of(sizes, rng.randint(0, 1), choice)
        check(run(world, [rng.randrange(10**6) for _ in range(400)]))
        seen += world.moves
        seen["late"] += sum(not on_time for rank in world.ranks for on_time in rank.verdicts.values())
    kinds = {"late", "stop", "continue", "duplicate", "catching up", "deliver"}
    assert {kind for kind in kinds if seen[kind]} == kinds
    assert seen["die"] > 0


# -- one rank ----------------------------------------------------------------------------------------------------------


def member(rank: int = 1, size: int = 3) -> Member:
    """A rank whose coordinator is rank 0."""
    return Member(rank, size, 2, 0, Partition(NUMEL, 2, torch.float64), 0.5, computing_since=0.0)


def waiting(step: int = 0) -> Member:
    """The same rank, which has contributed at 1 s."""
    one = member()
    actions = one.contribute(step, gradient_of(1, step), 7, 1.0, 1.0)
    assert actions == [Send(0, ControlMessage(Kind.READY, step, 0, 7, 1_000_000))]
    return one


def start(attempt: int) -> ControlMessage:
    return ControlMessage(Kind.START, 0, attempt, members=(0, 1))


def test_a_rank_sends_ready_again_when_it_has_waited_longer_than_usual() -> None:
    one = waiting()
    assert one.seconds_to_wait(1.0) == pytest.approx(8.0)  # before the first reduction was timed
    assert one.time_passed(8.9) == []
    (again,) = one.time_passed(9.1)
    assert again == Send(0, ControlMessage(Kind.READY, 0, 0, 7, 1_000_000))
    assert one.time_passed(9.2) == []
    one.receive(0, start(1), 10.0)
    current = one.round
    assert current is not None
    assert one.seconds_to_wait(10.0) is None, "it has chunks to send"
    one.advance(current)
    assert one.time_passed(11.9) == []
    assert one.time_passed(12.1) == [Send(0, ControlMessage(Kind.READY, 0, 1, 7, 1_000_000))]


def test_a_rank_that_is_told_twice_does_once() -> None:
    one = waiting()
    one.receive(0, start(1), 1.0)
    assert one.round is not None
    started = one.round.reduction
    assert started is not None
    for _ in range(2):
        assert one.receive(0, start(1), 1.0) == []
        assert one.round.reduction is started
        one.receive(0, ControlMessage(Kind.BARRIER, 0, 1), 1.0)
        one.receive(2, ControlMessage(Kind.BARRIER, 0, 1), 1.0)
    one.enter_barrier(0, 1.0)
    assert one.missing_at_barrier() == []
    one.enter_barrier(0, 1.0)
    one.receive(0, ControlMessage(Kind.BARRIER, 0, 2), 1.0)
    assert one.missing_at_barrier() == [2]


def test_chunks_that_are_here_before_their_attempt_wait_for_it() -> None:
    one = waiting()
    for attempt in (1, 3, 2):
        content = torch.full((3,), float(attempt), dtype=torch.float64).view(torch.uint8)
        one.receive_gradient(0, GradientChunk(0, attempt, 1, 0, content))
    for attempt in (1, 2, 3):
        one.receive(0, start(attempt), 1.0)
        current = one.round
        assert current is not None
        assert current.reduction is not None
        assert current.reduction.received[0].tolist() == [float(attempt)] * 2


def test_what_was_decided_stays_decided() -> None:
    one = waiting()
    one.receive(0, ControlMessage(Kind.COMMIT, 0, 1, members=(0, 2)), 1.0)
    one.receive(0, start(2), 1.0)
    one.receive(0, ControlMessage(Kind.LATE, 3, answers=0, members=(1, 2)), 1.0)
    assert one.round is not None
    assert one.round.outcome == ControlMessage(Kind.COMMIT, 0, 1, members=(0, 2))


def test_a_state_is_sent_only_between_steps_and_only_if_it_is_new_enough() -> None:
    one = waiting()
    assert one.receive(2, ControlMessage(Kind.STATE_REQUEST, 0), 1.0) == [SendState(2)]
    assert one.receive(2, ControlMessage(Kind.STATE_REQUEST, 1), 1.0) == []
    one.receive(0, ControlMessage(Kind.COMMIT, 0, 1, members=(0, 1)), 1.0)
    assert one.round is not None
    one.begin_update(one.round, 2.0)
    assert one.receive(0, ControlMessage(Kind.STATE_REQUEST, 0), 1.0) == []
    assert one.end_step(1, 3.0) == [SendState(2), SendState(0)]
    assert one.end_step(2, 4.0) == []


def test_a_late_rank_asks_one_member_after_the_other_and_takes_no_state_from_before() -> None:
    one = waiting()
    one.receive(0, ControlMessage(Kind.LATE, 5, answers=0, members=(0, 2)), 1.0)
    asked = [*one.recover(1.0), *one.time_passed(9.1), *one.time_passed(9.2), *one.time_passed(25.2)]
    assert asked == [Send(rank, ControlMessage(Kind.STATE_REQUEST, 5)) for rank in (2, 0, 2)]
    old, new = (StateChunk(step, 1, 0, 3, torch.arange(8)) for step in (4, 6))
    one.receive_state(0, old)
    assert not one.has_state
    one.receive_state(2, new)
    assert one.has_state
    step, content = one.take_state()
    assert (step, content.tolist()) == (6, [0, 1, 2])
    one.receive_state(0, new)
    assert not one.has_state


def test_the_state_machines_know_no_thread_no_clock_and_no_connection() -> None:
    folder = Path(member_module.__file__).parent
    for name in ("member", "coordinator", "reductions", "rules", "messages", "rounds"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        ours = {module for module in imported if module.startswith("thinwire")}
        assert all(module.startswith("thinwire.asynchronous.quorum.") for module in ours), (name, ours)
        assert not imported & {"threading", "time", "socket", "asyncio", "torch.distributed", "queue"}, name
