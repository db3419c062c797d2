# SPDX-License-Identifier: Apache-2.0
"""The coordinator is lost, and its successors: what was used stays decided, and what nobody holds is decided anew."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.quorum.test_member import CHOICES, REDUCTIONS, check, member, start, waiting, world_of
from tests.quorum.world import Move, World, gradient_of
from thinwire.quorum.member import Member, Send
from thinwire.quorum.messages import ControlMessage, Kind, StateChunk
from thinwire.quorum.succession import ATTEMPTS, Succession, splits

SIZES = [(2, 1), (3, 2), (4, 3), (4, 2), (5, 3), (5, 2), (6, 4), (7, 4)]
TELLING = {Kind.COMMIT, Kind.PROMISE, Kind.TAKEOVER, Kind.RESUME}  # in whose midst a rank is most likely to be lost


def weight(world: World, name: str, rank: int) -> float:
    """Waits that change nothing are rare, so that runs get far."""
    if name == "waiting":
        current = world.ranks[rank].member.round
        return 8.0 if current is not None and (current.has_work or current.is_over) else 0.3
    if name == "all-reduce":
        joined = world.collectives[world.ranks[rank].starts[0].all_reduce]
        return 0.02 if rank in joined and len(joined) < world.size else 5.0
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
    """A run in which ranks are lost at the worst moments, the coordinator above all."""
    rng = random.Random(seed)
    sizes = rng.choice(SIZES)
    first, choice, reduction = rng.randrange(sizes[0]), rng.choice(CHOICES), rng.choice(REDUCTIONS)
    world = world_of(sizes, first, choice, reduction, tells=rng.random() < 0.5)
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
        for place in {rank.member.succession.place_of(rank.member.succession.coordinator_rank) for rank in world.ranks}:
            seen[f"coordinator {place}"] += 1
        seen["decided anew"] += sum(len({members for _, members in each}) > 1 for each in world.commits.values())
    return seen


def test_whoever_is_lost_all_that_live_agree_on_every_step_that_one_of_them_has_used() -> None:
    seen = try_seeds(range(150))
    assert min(seen["coordinator 1"], seen["coordinator 2"], seen["decided anew"]) > 0, seen


@pytest.mark.slow
def test_whoever_is_lost_all_that_live_agree_on_every_step_in_many_runs() -> None:
    seen = try_seeds(range(150, 2500))
    assert min(seen["coordinator 3"], seen["decided anew"]) > 2, seen


# -- one rank ----------------------------------------------------------------------------------------------------------


def kinds(actions: list[object]) -> list[tuple[int, Kind]]:
    return [(each.dst, each.message.kind) for each in actions if isinstance(each, Send)]


def test_a_rank_whose_coordinator_is_lost_promises_and_is_ready_again_at_the_next() -> None:
    one = waiting()  # rank 1 is the next itself
    assert kinds([*one.lose([0], [0], 2.0)]) == [(2, Kind.TAKEOVER)]
    two = member(rank=2)
    two.contribute(0, gradient_of(2, 0), 7, 1.0, 1.0)
    assert kinds([*two.lose([0], [0], 2.0)]) == [(1, Kind.PROMISE), (1, Kind.READY)]
    assert two.waits_for() == [1]


def test_a_rank_that_computes_takes_over_when_another_one_promises_it_to_follow() -> None:
    one = member()
    promise = ControlMessage(Kind.PROMISE, 0)
    assert kinds([*one.receive(2, promise, 1.0)]) == [(0, Kind.TAKEOVER), (2, Kind.TAKEOVER)]
    assert one.waits_for() == [0], "it has not noticed yet"
    assert kinds([*one.lose([0], [0], 1.0)]) == [(2, Kind.RESUME)]
    assert one.receive(2, promise, 2.0) == []
    assert one.waits_for() == [1]


def test_what_an_earlier_coordinator_says_is_dropped() -> None:
    two = member(rank=2)
    two.contribute(0, gradient_of(2, 0), 7, 1.0, 1.0)
    assert kinds([*two.receive(1, ControlMessage(Kind.TAKEOVER, 0), 2.0)]) == [(1, Kind.PROMISE), (1, Kind.READY)]
    commit = ControlMessage(Kind.COMMIT, 0, 1, members=(0, 1))
    for message in (commit, start(1, members=(0, 2)), ControlMessage(Kind.TAKEOVER, 0)):
        assert two.receive(0, message, 2.0) == []
    assert two.round is not None
    assert (two.round.outcome, two.round.attempt) == (None, 0)


def test_a_lost_rank_that_is_heard_again_counts_no_more() -> None:
    one = waiting()
    one.lose([0], [], 2.0)
    one.receive(2, ControlMessage(Kind.PROMISE, 0), 2.0)
    assert one.receive(0, ControlMessage(Kind.READY, 0, digest=7), 3.0) == []
    assert one.round is not None
    assert one.round.attempt == 0, "no attempt of both"


def test_attempts_of_two_coordinators_have_different_numbers() -> None:
    one = waiting()
    one.lose([0], [0], 2.0)
    one.receive(2, ControlMessage(Kind.PROMISE, 0), 2.0)
    (begun,) = one.receive(2, ControlMessage(Kind.READY, 0, digest=7), 3.0)
    assert isinstance(begun, Send)
    assert (begun.message.kind, begun.message.attempt) == (Kind.START, ATTEMPTS + 1)


def late(step: int = 5) -> Member:
    """Rank 1 of three, which has taken a step without a mean and asks for the state."""
    one = waiting()
    one.receive(0, ControlMessage(Kind.LATE, step, members=(0, 2)), 1.0)
    assert one.round is not None
    one.begin_update(one.round, 1.0)
    one.write_mean_(one.round, gradient_of(1, 0))
    one.recover(1.0)
    return one


def test_a_state_of_a_step_that_may_be_decided_anew_is_not_taken() -> None:
    one, chunk = late(), StateChunk(5, 1, 0, 3, gradient_of(1, 0))
    one.receive_state(2, chunk)
    assert one.has_state
    one.lose([0], [0], 2.0)
    assert not one.has_state
    one.receive_state(2, chunk)
    assert not one.has_state, "it was sent before the promise"
    one.receive(2, ControlMessage(Kind.PROMISE, 4, members=(0, 2)), 2.0)
    one.receive_state(2, chunk._replace(step=4))
    assert one.has_state, "nobody alive holds a later one"


def test_a_rank_that_has_no_state_promises_none_and_one_that_unpacks_promises_afterwards() -> None:
    (actions,) = [late().lose([0], [0], 2.0)]
    assert kinds([*actions]) == [(2, Kind.TAKEOVER)]
    two = member(rank=2)
    two.receive(0, ControlMessage(Kind.BARRIER, 0, 1), 1.0)
    two.taken = True
    assert two.receive(1, ControlMessage(Kind.TAKEOVER, 0), 2.0) == []
    assert two.end_step(3, (0, 1), 3.0) == [Send(1, ControlMessage(Kind.PROMISE, 3, members=(0, 1)))]


def test_if_all_that_held_the_last_steps_are_lost_the_others_are_told() -> None:
    one = late()
    one.lose([0], [0], 2.0)
    one.receive(2, ControlMessage(Kind.PROMISE, -1), 2.0)
    assert one.stranded
    assert one.cannot_go_on()


# -- split networks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(2, 9))
def test_no_two_parts_of_a_network_decide(size: int) -> None:
    for ended in range(size):
        running = size - ended
        for part in range(1, running):
            other = running - part
            takes_over = not splits(running, other, settled=False)
            other_goes_on = not splits(running, part, settled=True)
            assert not (takes_over and other_goes_on), (running, part)


def test_a_rank_that_is_left_over_does_not_take_over_unless_the_others_have_ended() -> None:
    one = Succession(1, 2, 0)
    one.lose([0], [])
    one.adopt(1)
    one.promises[1] = ControlMessage(Kind.PROMISE, 0)
    assert not one.may_begin()
    one.lose([], [0])
    assert one.may_begin()
    assert one.successor() is None
