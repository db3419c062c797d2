# SPDX-License-Identifier: Apache-2.0
"""Ranks are lost: up to as many as backups hold up nobody, and without the coordinator no step is decided."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.asynchronous.quorum.test_member import CHOICES, check, member, start, waiting, world_of
from tests.asynchronous.quorum.world import NUMEL, Move, World
from thinwire.asynchronous.quorum.member import Member, Send
from thinwire.asynchronous.quorum.messages import ControlMessage, Kind
from thinwire.asynchronous.quorum.reductions import Partition

SIZES = [(2, 1), (3, 2), (4, 3), (4, 2), (5, 3), (5, 2), (6, 4), (7, 4)]
TELLING = {Kind.READY, Kind.ACK}  # in whose midst a rank is most likely to be lost


def weight(world: World, name: str, rank: int) -> float:
    """Waits that change nothing are rare, so that runs get far."""
    if name == "waiting":
        current = world.ranks[rank].member.round
        return 8.0 if current is not None and (current.has_work or current.outcome) else 0.3
    return {"time": 0.5, "notice": 0.5, "catching up": 1.0}.get(name, 5.0)


def disturb(world: World, rng: random.Random) -> bool:
    """A rank stops, goes on or dies now and then, most often one whose messages are on their way; whether any did."""
    moves = [(name, move) for name, move in world.trouble() if name != "duplicate" or rng.random() < 0.1]
    senders = {
        src
        for (src, _), messages in world.edges.items()
        for message in messages
        if isinstance(message, ControlMessage) and message.kind in TELLING
    }
    doomed = [(name, move) for name, move in moves if name == "die" and move.args[0] in senders]
    chosen = doomed if doomed and rng.random() < 0.15 else moves if rng.random() < 0.04 else []
    if chosen:
        do(world, *rng.choice(chosen))
    return bool(chosen)


def do(world: World, name: str, move: Move) -> None:
    world.moves[name] += 1
    move()


def run_with_losses(seed: int) -> World:
    """A run in which ranks are lost at the worst moments."""
    rng = random.Random(seed)
    sizes = rng.choice(SIZES)
    world = world_of(sizes, rng.randrange(sizes[0]), rng.choice(CHOICES))
    troubled = rng.choice([60, 150, 400])
    for number in range(20_000):
        if number == troubled:
            world.stopped.clear()
        if number >= troubled and world.has_ended():
            check(world)
            return world
        if number >= troubled or not disturb(world, rng):
            moves = world.progress()
            do(world, *rng.choices(moves, [weight(world, name, move.args[0]) for name, move in moves])[0])
    raise AssertionError(f"no end: {[(rank.phase, len(rank.log)) for rank in world.ranks]}")


def try_seeds(seeds: range) -> Counter[str]:
    seen = Counter[str]()
    for seed in seeds:
        world = run_with_losses(seed)
        seen["runs"] += 1
        seen[f"{len(world.dead)} lost"] += 1
        seen["later attempts"] += sum(attempt > 1 for each in world.commits.values() for attempt, _ in each)
    return seen


def test_whoever_is_lost_all_that_live_agree_on_every_step_that_one_of_them_has_used() -> None:
    seen = try_seeds(range(150))
    assert min(seen["0 lost"], seen["1 lost"], seen["2 lost"], seen["later attempts"]) > 0, seen


@pytest.mark.slow
def test_whoever_is_lost_all_that_live_agree_on_every_step_in_many_runs() -> None:
    seen = try_seeds(range(150, 2500))
    assert min(seen["2 lost"], seen["later attempts"]) > 2, seen


# -- one rank ----------------------------------------------------------------------------------------------------------


def late() -> Member:
    """Rank 1 of three, which has taken a step without a mean and asks for the state."""
    one = waiting()
    one.receive(0, ControlMessage(Kind.LATE, 5, members=(0, 2)), 1.0)
    assert one.round is not None
    one.begin_update(one.round, 1.0)
    one.recover(1.0)
    return one


def test_a_rank_waits_for_its_coordinator_when_that_is_lost_and_for_no_other() -> None:
    one = waiting()
    assert one.lose([0], 2.0) == []
    assert one.waits_for() == [0]
    one.lose([2], 3.0)
    assert one.waits_for() == [0], "the error names the coordinator"
    two = waiting()
    two.lose([2], 2.0)
    assert two.waits_for() == [0], "as many as backups may be lost"
    one = member(size=4)
    one.lose([2, 3], 2.0)
    assert one.waits_for() == [0]


def test_more_losses_than_backups_are_named() -> None:
    zero = Member(0, 4, 3, 0, Partition(NUMEL, 3, torch.float64), 0.5, computing_since=0.0)
    zero.lose([2], 1.0)
    assert zero.waits_for() == [0]
    zero.lose([3], 1.0)
    assert zero.waits_for() == [2, 3]


def test_a_barrier_ends_where_the_coordinator_is_lost_before_it() -> None:
    one = member()
    one.enter_barrier(0, 1.0)
    assert (one.missing_at_barrier(), one.lost_at_barrier()) == ([0, 2], [])
    one.lose([2], 1.0)
    assert (one.missing_at_barrier(), one.lost_at_barrier()) == ([0], [])
    one.lose([0], 1.0)
    assert one.lost_at_barrier() == [0]
    two = member()
    two.receive(0, ControlMessage(Kind.BARRIER, 0, 1), 1.0)
    two.enter_barrier(0, 1.0)
    two.lose([0], 1.0)
    assert (two.missing_at_barrier(), two.lost_at_barrier()) == ([2], []), "it was here, and has ended since"


def test_a_lost_rank_that_is_heard_again_counts_no_more() -> None:
    one = waiting()
    one.lose([0], 2.0)
    assert one.receive(0, start(1), 3.0) == []
    assert one.round is not None
    assert one.round.attempt == 0


def test_a_state_comes_from_another_rank_where_a_member_is_lost_and_from_nobody_where_all_are() -> None:
    one = late()
    assert one.lose([2], 2.0) == [Send(0, ControlMessage(Kind.STATE_REQUEST, 5))]
    assert not one.stranded
    one.lose([0], 2.0)
    assert one.stranded
