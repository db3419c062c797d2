# SPDX-License-Identifier: Apache-2.0
"""What members and late ranks exchange, the log of members, and the data that each worker is assigned."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from thinwire import ConfigError, Replica
from thinwire.asynchronous.quorum.log import begin_log, memberships, write_log
from thinwire.asynchronous.quorum.messages import HEADER_BYTES, decode_gradient_chunk, encode_chunk
from thinwire.asynchronous.quorum.reductions import MessageReduction, Partition
from thinwire.asynchronous.quorum.state_transfer import digest, pack, unpack_
from thinwire.core.comm.counting import CountingComm
from thinwire.core.replica.moments import Moments
from thinwire.elastic import sampler as elastic_sampler
from thinwire.elastic.sampler import ElasticSampler, MembershipInterval

# -- reduction by messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("members", "parts"), [((0,), 1), ((0, 2), 2), ((1, 2, 4), 3), ((0, 1, 2, 3), 2)])
@pytest.mark.parametrize("numel", [1, 3, 7, 64])
def test_members_get_the_mean_of_a_sum_in_the_order_of_ranks(
    dtype: torch.dtype, members: tuple[int, ...], parts: int, numel: int
) -> None:
    partition = Partition(numel, parts, dtype)
    rng = torch.Generator().manual_seed(numel)
    vectors = {rank: torch.randn(numel, generator=rng).to(dtype) for rank in members}
    expected = sum((vectors[rank] for rank in members[1:]), vectors[members[0]]) / len(members)
    reductions = {rank: MessageReduction(partition, rank, members, 5, 1) for rank in members}
    while any(each.has_work and not each.done for each in reductions.values()):
        for rank, each in reductions.items():
            for dst, chunk in each.advance(vectors[rank]):
                message = encode_chunk(chunk, partition.nbytes)
                assert message.numel() == HEADER_BYTES + partition.nbytes
                reductions[dst].receive(rank, decode_gradient_chunk(message))
    for rank, each in reductions.items():
        each.write_(vectors[rank])
        assert torch.equal(vectors[rank], expected)


# -- state transfer -------------------------------------------------------------------------------------


def replica(
    kind: Callable[..., torch.optim.Optimizer], seed: int, **settings: object
) -> tuple[Replica, torch.optim.Optimizer]:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(6, generator=rng)
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


def test_an_optimizer_state_that_cannot_be_sent_is_refused() -> None:
    r, optimizer = replica(torch.optim.SGD, 0)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["extra"] = object()
    with pytest.raises(ConfigError, match="SGD: its state cannot be sent to a late worker"):
        pack(r, [])


# -- the log, and the data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 8, 9, 70])
def test_the_log_holds_the_members_of_each_step(size: int) -> None:
    r = Replica(torch.zeros(1), torch.zeros(1), CountingComm(0, size), lr=lambda: 0.1)
    rng, expected = random.Random(size), []
    begin_log(r)
    for _ in range(150):
        members = tuple(sorted(rng.sample(range(size), rng.randint(1, size))))
        expected.append(members)
        r.step += 1
        write_log(r, members)
    assert list(memberships(r)) == expected
    assert list(memberships(r, 140)) == expected[140:]
    assert r.state["used"].tolist() == [sum(rank in members for members in expected) for rank in range(size)]


def assignments(size: int, batches: int, members: list[tuple[int, ...]]) -> list[list[int]]:
    """The batches of each step's ranks; every rank has a sampler of its own."""
    r = [Replica(torch.zeros(1), torch.zeros(1), CountingComm(k, size), lr=lambda: 0.1) for k in range(size)]
    rows, samplers = [], [ElasticSampler(batches, seed=3) for _ in range(size)]
    for each in r:
        begin_log(each)
    for step in members:
        rows.append([sampler.batch(each) for sampler, each in zip(samplers, r, strict=True)])
        for each in r:
            each.step += 1
            write_log(each, step)
    return rows


def test_a_batch_that_was_dropped_is_assigned_again_before_the_epoch_ends() -> None:
    rows = assignments(3, 12, [(0, 1)] * 6)
    used = [row[rank] for row in rows for rank in (0, 1)]
    assert sorted(used) == list(range(12))
    assert len({batch for row in rows for batch in row}) == 12


def test_without_late_ranks_every_batch_is_assigned_once_an_epoch_in_a_new_order() -> None:
    rows = [batch for row in assignments(4, 8, [(0, 1, 2, 3)] * 4) for batch in row]
    assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8))
    assert rows[:8] != rows[8:]


def test_a_worker_that_was_behind_is_assigned_the_same_batches() -> None:
    members = [(0, 1), (0, 2), (1, 2), (0, 1), (0, 1)]
    rows = assignments(3, 7, members)
    late = Replica(torch.zeros(1), torch.zeros(1), CountingComm(2, 3), lr=lambda: 0.1)
    begin_log(late)
    sampler = ElasticSampler(7, seed=3)
    assert sampler.batch(late) == rows[0][2]
    for step in members[:4]:
        late.step += 1
        write_log(late, step)
    assert sampler.batch(late) == rows[4][2]
    assert list(sampler.until(late, 4)) == []


def test_an_epoch_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="batches=0: must be at least 1"):
        ElasticSampler(0)


# -- data of elastic workers -----------------------------------------------------------------------------------------


def elastic(worker_id: str, step: int, crews: list[MembershipInterval]) -> Any:
    """What the sampler asks of an elastic worker."""
    return SimpleNamespace(step=step, elastic=SimpleNamespace(worker_id=worker_id, crews=lambda: crews))


def assigned(worker_id: str, crews: list[MembershipInterval], steps: range, batches: int = 24) -> list[tuple[int, int]]:
    """The batches of one worker that takes these steps, each as (epoch, number)."""
    sampler = ElasticSampler(batches)
    return [sampler.assignment(elastic(worker_id, step, crews)) for step in steps]


@pytest.mark.parametrize("computed", [0, 4])
def test_batches_of_a_lost_worker_since_the_last_average_are_assigned_again(computed: int) -> None:
    """b is killed in a round of local steps, and the others notice at its end."""
    crews = [MembershipInterval(0, ("a", "b")), MembershipInterval(8, ("a",), unused_from=computed)]
    b = assigned("b", crews[:1], range(8))
    a = assigned("a", crews, range(24 - computed))
    assert a[8 : 16 - computed] == b[computed:], "first of all, in the order in which they were assigned"
    assert sorted({*a, *b[:computed]}) == [(0, number) for number in range(24)]
    sampler = ElasticSampler(24)
    for step in range(8, 18):
        left = b[computed + step - 8 :]
        assert sampler.lost(elastic("a", step, crews)) == ({0: [number for _, number in left]} if left else {})


def test_lost_batches_are_listed_by_epoch() -> None:
    crews = [MembershipInterval(0, ("a", "b")), MembershipInterval(6, ("a",), unused_from=0)]
    b = assigned("b", crews[:1], range(6), batches=8)
    lost = ElasticSampler(8).lost(elastic("a", 6, crews))
    assert lost == {epoch: [number for e, number in b if e == epoch] for epoch in (0, 1)}


def test_a_worker_that_learns_of_a_loss_late_assigns_as_one_that_knew_it() -> None:
    crews = [
        MembershipInterval(0, ("a", "b", "c")),
        MembershipInterval(5, ("a", "c"), unused_from=3),
        MembershipInterval(5, ("a", "c", "d")),
        MembershipInterval(9, ("c", "d"), ("a",)),
    ]
    sampler, found = ElasticSampler(10), list[tuple[int, int]]()
    for step in range(20):
        known = [crew for crew in crews if crew.begins <= max(step, 0)]
        found.append(sampler.assignment(elastic("c", step, known)))
    assert found == assigned("c", crews, range(20), batches=10)
    everyone = [*assigned("a", crews, range(9), 10), *found, *assigned("b", crews, range(3), 10)]
    everyone += assigned("d", crews, range(5, 20), 10)
    assert len(everyone) == len({*everyone}), "nobody computes what another one has used"
    for epoch in range(4):
        assert sorted(number for e, number in everyone if e == epoch) == list(range(10))


def test_a_long_run_is_replayed_where_a_loss_reaches_far_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_sampler, "_RECORDED_STEPS", 4)
    crews = [MembershipInterval(0, ("a", "b")), MembershipInterval(40, ("a",), unused_from=2)]
    sampler = ElasticSampler(30)
    found = [sampler.assignment(elastic("a", step, crews[: 1 + (step >= 40)])) for step in range(60)]
    assert found[40:60] == assigned("b", crews[:1], range(2, 22), 30)
    assert len(sampler._record) < 60
