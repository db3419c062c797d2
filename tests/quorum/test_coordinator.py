"""Arrivals: who is decided to be a member, how long is waited, and what late workers are given."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from torch import nn

from tests.oracles.backup import Crowd
from thinwire import ConfigError, Replica
from thinwire.comm.counting import CountingComm
from thinwire.quorum.adding import HEADER_BYTES, Adding, Cut, Piece, piece_of
from thinwire.quorum.control_messages import Kind, Note, length, note_of
from thinwire.quorum.coordinator import Keeper
from thinwire.quorum.elastic_sampler import ElasticSampler
from thinwire.quorum.log import begin_log, memberships, write_log
from thinwire.quorum.packing import digest, pack, unpack_
from thinwire.quorum.reduction_selector import Plane, Planes
from thinwire.quorum.rules import Rule, best_number, deadline, order_statistics
from thinwire.replica.moments import Moments


def here(step: int, *, attempt: int = 0, digest: int = 0, seconds: float = 0.0) -> Note:
    return Note(Kind.HERE, step, attempt, digest=digest, microseconds=int(1e6 * seconds))


def run_step(keeper: Keeper, ranks: list[int], now: float = 0.0) -> tuple[int, ...]:
    """Ranks arrive in this order, and all members hold the mean; returns the members."""
    step, closed = keeper.step, []
    for rank in ranks:
        for dst, note in keeper.hear(rank, here(step), now):
            if note.kind is Kind.GO:
                closed += keeper.hear(dst, Note(Kind.HELD, step, note.attempt), now)
    return next(note.members for _, note in closed)


# -- the keeper ------------------------------------------------------------------------------------------------------


def test_the_first_to_come_are_members_and_everyone_else_is_late() -> None:
    keeper = Keeper(Rule(4, 3))
    assert run_step(keeper, [2, 0, 3]) == (0, 2, 3)
    assert keeper.hear(1, here(0), 0.0) == [(1, Note(Kind.LATE, 1, 0, members=(0, 2, 3)))]


def test_who_comes_while_members_add_up_is_told_when_they_are_done() -> None:
    keeper = Keeper(Rule(3, 2))
    keeper.hear(0, here(0), 0.0)
    keeper.hear(1, here(0), 0.0)
    assert keeper.hear(2, here(0), 0.0) == []
    keeper.hear(0, Note(Kind.HELD, 0, 1), 0.0)
    told = keeper.hear(1, Note(Kind.HELD, 0, 1), 0.0)
    assert {(dst, note.kind, note.members) for dst, note in told} == {(rank, Kind.CLOSED, (0, 1)) for rank in range(3)}


def test_a_silent_member_is_left_out_of_the_next_attempt_and_comes_too_late() -> None:
    keeper = Keeper(Rule(3, 2))
    keeper.hear(0, here(0), 0.0)
    keeper.hear(1, here(0), 0.0)
    keeper.hear(2, here(0), 0.0)
    assert keeper.hear(0, here(0, attempt=1), 1.0) == []
    again = keeper.hear(0, here(0, attempt=1), 2.0)
    assert again == [(rank, Note(Kind.GO, 0, 2, members=(0, 2))) for rank in (0, 2)]
    for rank in range(3):
        assert keeper.hear(rank, Note(Kind.HELD, 0, 1), 2.0) == []
    keeper.hear(0, Note(Kind.HELD, 0, 2), 2.0)
    keeper.hear(2, Note(Kind.HELD, 0, 2), 2.0)
    assert keeper.hear(1, here(0), 3.0)[0][1].kind is Kind.LATE


def test_members_that_all_wait_are_given_all_the_time_they_need() -> None:
    keeper = Keeper(Rule(3, 2))
    for now in range(20):
        keeper.hear(0, here(0, attempt=1), now)
        keeper.hear(1, here(0, attempt=1), now)
    assert (keeper.attempt, keeper.members) == (1, (0, 1))


def test_a_member_that_holds_the_mean_is_not_silent() -> None:
    keeper = Keeper(Rule(2, 2))
    keeper.hear(0, here(0), 0.0)
    keeper.hear(1, here(0), 0.0)
    keeper.hear(1, Note(Kind.HELD, 0, 1), 0.0)
    for now in range(5):
        assert keeper.hear(0, here(0, attempt=1), now) == []


@pytest.mark.parametrize("plane", ["ring", "zeros", "auto"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("size", "least"), [(2, 1), (4, 3), (5, 3), (9, 7)])
def test_each_step_is_closed_once_and_alike_for_all_whoever_stops_when(
    size: int, least: int, seed: int, plane: Plane
) -> None:
    draw = random.Random(seed)
    crowd = Crowd(Keeper(Rule(size, least), Planes(plane)), draw)
    for now in range(3000):
        if draw.random() < 0.02:
            crowd.stopped = set(draw.sample(range(size), draw.randint(0, size - least)))
        crowd.act(draw.randrange(size), now)
    stopped_at, crowd.stopped = crowd.keeper.step, set()
    for now in range(3000, 5000):
        crowd.act(draw.randrange(size), now)
    assert crowd.keeper.step > stopped_at + 5
    decided: dict[int, tuple[int, ...]] = {}
    for seen in crowd.closed.values():
        for step, members in seen.items():
            assert decided.setdefault(step, members) == members
    assert all(len(set(members)) >= least for members in decided.values())
    added = {(step, members) for step, _, members in crowd.sums}
    assert all((step, members) in added for step, members in decided.items())
    assert (crowd.keeper.sums > 2) == (plane != "ring")


def test_ranks_whose_optimizers_differ_are_all_refused() -> None:
    keeper = Keeper(Rule(3, 2))
    keeper.hear(2, here(0, digest=7), 0.0)
    told = keeper.hear(0, here(0, digest=8), 0.0)
    assert told == [(rank, Note(Kind.REFUSED, 0, members=(2, 0))) for rank in (2, 0)]


def test_a_note_survives_its_numbers() -> None:
    note = Note(Kind.GO, 2**40, 3, 2**32 - 1, 5, 2**20, (0, 69))
    assert note_of(note.vector(70).tolist()) == note
    assert note.vector(70).numel() == length(70)


# -- how long to wait ------------------------------------------------------------------------------------------------


def test_the_mean_time_of_the_nth_is_the_closed_form() -> None:
    size, number, shift, rate = 16, 14, 1.0, 2.0
    draw = random.Random(0)
    seconds = [[shift + draw.expovariate(rate) for _ in range(20_000)] for _ in range(size)]
    harmonic = sum(1 / k for k in range(size - number + 1, size + 1))
    assert order_statistics(seconds)[number - 1] == pytest.approx(shift + harmonic / rate, rel=0.01)


def test_a_keeper_waits_for_the_nth_whatever_the_slowest_does() -> None:
    draw = random.Random(1)
    for delay in (1.0, 10.0):
        times = []
        for _ in range(200):
            at = sorted((draw.random() + (delay if rank == 2 else 0), rank) for rank in range(4))
            keeper = Keeper(Rule(4, 3))
            times.append(next(now for now, rank in at if keeper.hear(rank, here(0), now)))
        assert fmean(times) == pytest.approx(0.75, abs=0.05)


def test_the_number_that_makes_the_most_of_time_is_found() -> None:
    assert best_number([[1.0], [1.0], [1.0], [10.0]]) == 3
    assert best_number([[1.0], [1.0], [1.0], [1.1]]) == 4
    assert best_number([[1.0], [9.0], [9.0], [9.0]], least=2) == 4


def test_a_rule_that_chooses_drops_nobody_among_equals_and_the_slow_one_otherwise() -> None:
    rule = Rule(4, 2, "online")
    assert rule.patience(2, 0.0) == 0.0
    for _ in range(5):
        for rank in range(4):
            rule.note(rank, 1.0)
    assert (rule.patience(3, 0.0), rule.patience(4, 0.0)) == (None, 0.0)
    for _ in range(64):
        rule.note(3, 50.0)
    assert (rule.patience(2, 0.0), rule.patience(3, 0.0)) == (None, 0.0)


def test_a_deadline_is_not_moved_by_few_stragglers() -> None:
    assert deadline([1.0, 1.2, 0.8, 1.0, 1.4, 100.0], 3.0) == pytest.approx(1.7)
    assert deadline([1.0, 1.0, 1.0, 100.0], 3.0) == 1.25


def test_a_deadline_takes_all_who_come_within_it() -> None:
    rule = Rule(4, 2, "deadline", 2.0)
    for step in range(4):
        for rank in range(4):
            rule.note(rank, 1.0 + 0.4 * (step % 2))
    assert rule.patience(1, 9.0) is None
    assert rule.patience(2, 1.0) == pytest.approx(0.6)
    assert rule.patience(3, 1.7) == 0.0
    assert rule.patience(4, 0.1) == 0.0
    keeper = Keeper(rule)
    for rank, now in enumerate((11.2, 11.25, 11.3)):
        assert keeper.hear(rank, here(0, seconds=1.2), now) == []
    assert keeper.rest(11.4) == pytest.approx(0.2)
    assert {note.members for _, note in keeper.look(11.7)} == {(0, 1, 2)}


def test_gradients_that_come_first_are_unbiased_and_as_noisy_as_so_many() -> None:
    draw, size, least = torch.Generator().manual_seed(0), 6, 4
    gradients = 2.0 + 3.0 * torch.randn(4000, size, generator=draw, dtype=torch.float64)
    order = torch.rand(4000, size, generator=draw).argsort(1)
    keeper = Keeper(Rule(size, least))
    arrivals = zip(gradients, order.tolist(), strict=True)
    means = torch.stack([row[list(run_step(keeper, ranks))].mean() for row, ranks in arrivals])
    assert means.mean().item() == pytest.approx(2.0, abs=4 * 1.5 / 4000**0.5)
    assert means.var().item() == pytest.approx(9 / least, rel=0.1)


def test_where_delays_depend_on_the_data_the_mean_is_biased() -> None:
    draw, keeper = torch.Generator().manual_seed(0), Keeper(Rule(4, 3))
    gradients = torch.randn(1000, 4, generator=draw, dtype=torch.float64)
    means = [row[list(run_step(keeper, row.argsort().tolist()))].mean() for row in gradients]
    assert torch.stack(means).mean() < -0.2


# -- adding up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("members", "parts"), [((0,), 1), ((0, 2), 2), ((1, 2, 4), 3), ((0, 1, 2, 3), 2)])
@pytest.mark.parametrize("numel", [1, 3, 7, 64])
def test_members_get_the_sum_in_the_order_of_ranks_divided_by_their_number(
    dtype: torch.dtype, members: tuple[int, ...], parts: int, numel: int
) -> None:
    cut = Cut(numel, parts, dtype)
    draw = torch.Generator().manual_seed(numel)
    vectors = {rank: torch.randn(numel, generator=draw).to(dtype) for rank in members}
    expected = sum((vectors[rank] for rank in members[1:]), vectors[members[0]]) / len(members)
    rooms = {rank: Adding(cut, rank, members) for rank in members}
    while any(room.wakes and not room.is_done for room in rooms.values()):
        for rank, room in rooms.items():
            for part in room.messages(vectors[rank]):
                message = Piece(5, 1, part.place, part.whole, part.content).message(cut.nbytes)
                assert message.numel() == HEADER_BYTES + cut.nbytes
                rooms[part.dst].take(rank, piece_of(message))
    for rank, room in rooms.items():
        room.put(vectors[rank])
        assert torch.equal(vectors[rank], expected)


# -- what a late worker is given -------------------------------------------------------------------------------------


def replica(
    kind: Callable[..., torch.optim.Optimizer], seed: int, **settings: object
) -> tuple[Replica, torch.optim.Optimizer]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(6, generator=draw)
    parameter = nn.Parameter(x)
    optimizer = kind([parameter], lr=0.1 + seed, **settings)
    r = Replica(x, torch.zeros(6), CountingComm(0, 3), lr=lambda: 0.1, moments=Moments(optimizer, [parameter], ()))
    begin_log(r)
    return r, optimizer


def move(r: Replica, optimizer: torch.optim.Optimizer, seed: int) -> None:
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.randn(6, generator=torch.Generator().manual_seed(seed))
    optimizer.step()
    r.step += 1
    write_log(r, [0, r.step % 3])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"centered": True}),
        (torch.optim.Adagrad, {}),
    ],
)
@pytest.mark.parametrize("behind", [0, 1])
def test_a_packed_state_goes_on_as_the_one_it_was_packed_from(
    kind: type[torch.optim.Optimizer], settings: dict[str, object], behind: int
) -> None:
    ahead, ours = replica(kind, 0, **settings)
    late, theirs = replica(kind, 1, **settings)
    for step in range(3):
        move(ahead, ours, step)
    for step in range(behind):
        move(late, theirs, 50 + step)
    unpack_(late, pack(ahead, ["members", "used"]))
    late.step = 3
    assert digest(late) == digest(ahead)
    for step in range(3, 6):
        move(ahead, ours, step)
        move(late, theirs, step)
    assert torch.equal(ahead.x, late.x)
    assert list(memberships(ahead)) == list(memberships(late))


def test_what_an_optimizer_is_set_to_changes_the_digest() -> None:
    r, optimizer = replica(torch.optim.SGD, 0)
    before = digest(r)
    optimizer.param_groups[0]["lr"] = 0.2
    assert digest(r) != before


def test_an_optimizer_with_an_odd_memory_is_refused_in_words() -> None:
    r, optimizer = replica(torch.optim.SGD, 0)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["odd"] = object()
    with pytest.raises(ConfigError, match="SGD: what it remembers cannot be sent to a late worker"):
        pack(r, [])


# -- the log, and the data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 8, 9, 70])
def test_the_log_tells_who_was_a_member_of_each_step(size: int) -> None:
    r = Replica(torch.zeros(1), torch.zeros(1), CountingComm(0, size), lr=lambda: 0.1)
    draw, expected = random.Random(size), []
    begin_log(r)
    for _ in range(150):
        members = tuple(sorted(draw.sample(range(size), draw.randint(1, size))))
        expected.append(members)
        r.step += 1
        write_log(r, members)
    assert list(memberships(r)) == expected
    assert list(memberships(r, 140)) == expected[140:]
    assert r.state["used"].tolist() == [sum(rank in members for members in expected) for rank in range(size)]


def deals(size: int, batches: int, members: list[tuple[int, ...]]) -> list[list[int]]:
    """What each step's ranks are dealt, each rank by a dispenser of its own."""
    r = [Replica(torch.zeros(1), torch.zeros(1), CountingComm(k, size), lr=lambda: 0.1) for k in range(size)]
    rows, dispensers = [], [ElasticSampler(batches, seed=3) for _ in range(size)]
    for each in r:
        begin_log(each)
    for step in members:
        rows.append([dispenser.batch(each) for dispenser, each in zip(dispensers, r, strict=True)])
        for each in r:
            each.step += 1
            write_log(each, step)
    return rows


def test_a_batch_that_was_dropped_is_dealt_again_before_the_epoch_ends() -> None:
    rows = deals(3, 12, [(0, 1)] * 6)
    used = [row[rank] for row in rows for rank in (0, 1)]
    assert sorted(used) == list(range(12))
    assert len({batch for row in rows for batch in row}) == 12


def test_everyone_in_time_deals_every_batch_once_an_epoch_in_another_order() -> None:
    rows = [batch for row in deals(4, 8, [(0, 1, 2, 3)] * 4) for batch in row]
    assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8))
    assert rows[:8] != rows[8:]


def test_a_worker_that_was_behind_is_dealt_what_it_would_have_been() -> None:
    members = [(0, 1), (0, 2), (1, 2), (0, 1), (0, 1)]
    rows = deals(3, 7, members)
    late = Replica(torch.zeros(1), torch.zeros(1), CountingComm(2, 3), lr=lambda: 0.1)
    begin_log(late)
    dispenser = ElasticSampler(7, seed=3)
    assert dispenser.batch(late) == rows[0][2]
    for step in members[:4]:
        late.step += 1
        write_log(late, step)
    assert dispenser.batch(late) == rows[4][2]
    assert list(dispenser.until(late, 4)) == []


def test_an_epoch_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batches=0: must be at least 1"):
        ElasticSampler(0)
