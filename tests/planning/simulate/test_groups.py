# SPDX-License-Identifier: Apache-2.0
"""Comms among some of the simulated workers: their own ranks and messages, and interfaces that all of them share."""

from __future__ import annotations

import pytest
import torch

from thinwire import CommTimeoutError, ConfigError, MismatchError, PeerLostError
from thinwire.planning.simulate import Death, Network, Racks, SimulatedComm, run, simulate
from thinwire.planning.simulate.wires import PAYLOAD_SHARE

NETWORK = Network(bits_per_second=8e6 / PAYLOAD_SHARE, latency=0.0)  # a megabyte of payload a second
MEGABYTE = torch.ones(250_000)


def test_ranks_and_values_are_those_of_the_group() -> None:
    def work(comm: SimulatedComm) -> list[object]:
        odd = comm.among([3, 1]) if comm.rank % 2 else comm.among([0, 2])
        (came,) = odd.send_recv(torch.tensor([comm.rank]), [1 - odd.rank], [1 - odd.rank]).wait()
        total = odd.all_reduce_(torch.tensor([comm.rank])).wait()
        gathered = torch.cat(odd.all_gather(torch.tensor([comm.rank])).wait())
        chosen = odd.broadcast_(torch.tensor([comm.rank]), 1).wait()
        pieces = odd.all_to_all([torch.tensor([comm.rank])] * 2, [1, 1]).wait()
        return [odd.rank, odd.worker, *(x.tolist() for x in (came, total, gathered, chosen, torch.cat(pieces)))]

    assert run(4, work) == [
        [0, 0, [2], [2], [0, 2], [2], [0, 2]],
        [1, 1, [3], [4], [3, 1], [1], [3, 1]],
        [1, 2, [0], [2], [0, 2], [2], [0, 2]],
        [0, 3, [1], [4], [3, 1], [1], [3, 1]],
    ]


def test_groups_that_share_an_interface_wait_for_each_other_there() -> None:
    def work(comm: SimulatedComm) -> float:
        first = comm.among([0, 1]) if comm.rank < 2 else None
        second = comm.among([0, 2]) if comm.rank != 1 else None
        waits = [
            group.send_recv(MEGABYTE, [1] * (group.rank == 0), [0] * group.rank) for group in (first, second) if group
        ]
        for each in waits:
            each.wait()
        return round(comm.now, 3)

    # Rank 0 sends a megabyte in either group, one after the other.
    assert run(3, work, network=NETWORK) == [2.0, 1.0, 2.0]


def test_groups_that_share_none_do_not() -> None:
    def work(comm: SimulatedComm) -> float:
        pair = comm.among([0, 1] if comm.rank < 2 else [2, 3])
        pair.all_reduce_(MEGABYTE.clone()).wait()
        return round(comm.now, 3)

    assert run(4, work, network=NETWORK) == [1.0] * 4


def test_racks_are_those_of_the_workers_and_not_of_the_group() -> None:
    def work(comm: SimulatedComm) -> float:
        pair = comm.among([0, 2] if comm.rank % 2 == 0 else [1, 3])
        pair.send_recv(MEGABYTE, [1 - pair.rank], [1 - pair.rank]).wait()
        return round(comm.now, 3)

    # Both pairs cross from one rack to the other, over one uplink in each direction.
    network = Network(bits_per_second=8e6 / PAYLOAD_SHARE, latency=0.0, racks=Racks(2, 8e6 / PAYLOAD_SHARE))
    assert max(run(4, work, network=network)) == 2.0


def test_rings_of_groups_share_the_uplinks_of_racks() -> None:
    def work(comm: SimulatedComm) -> float:
        pair = comm.among([0, 2] if comm.rank % 2 == 0 else [1, 3])
        for _ in range(2):
            pair.all_reduce_(MEGABYTE.clone()).wait()
        return round(comm.now, 3)

    # Each worker of a rack sends a megabyte through its uplink, in each of two all-reduces.
    network = Network(bits_per_second=8e6 / PAYLOAD_SHARE, latency=0.0, racks=Racks(2, 8e6 / PAYLOAD_SHARE))
    assert max(run(4, work, network=network)) == 4.0


def test_errors_name_workers_by_their_numbers_among_all() -> None:
    def work(comm: SimulatedComm) -> None:
        comm.compute(1.0)
        if comm.rank < 2:
            return
        pair = comm.among([2, 3])
        pair.all_reduce_(torch.ones(2)).wait()

    ended = simulate(4, work, network=Network(deaths=(Death(rank=3, at=0.5),)))
    assert isinstance(ended.failures[2], PeerLostError)
    assert "rank 2, step 0" in str(ended.failures[2]) and "rank 3 is lost" in str(ended.failures[2])
    silent = simulate(4, work, network=Network(deaths=(Death(rank=3, at=0.5, silent=True),)), timeout=5.0)
    assert isinstance(silent.failures[2], CommTimeoutError) and "rank 3 is not answering" in str(silent.failures[2])


def test_groups_without_the_lost_rank_go_on() -> None:
    def work(comm: SimulatedComm) -> str:
        pair = comm.among([0, 1] if comm.rank < 2 else [2, 3])
        for _ in range(3):
            comm.compute(1.0)
            pair.all_reduce_(torch.ones(2)).wait()
        try:
            comm.all_reduce_(torch.ones(2)).wait()
        except PeerLostError as error:
            return f"{comm.now:.0f} s: {error}"
        return ""

    ended = simulate(4, work, network=Network(deaths=(Death(rank=3, at=0.5),)))
    assert "step 0, all_reduce of 2 x float32: rank 3 is lost" in str(ended.failures[2]) and set(ended.failures) == {2}
    for rank in (0, 1):
        # Until the call of all ranks.
        assert ended.results[rank] == (
            f"3 s: rank {rank}, step 0, all_reduce of 2 x float32: rank 3 is lost (died at 0.5 s)"
        )


def test_a_group_without_this_rank_and_mailboxes_in_groups_are_refused() -> None:
    def absent(comm: SimulatedComm) -> None:
        comm.among([1])

    def mailbox(comm: SimulatedComm) -> None:
        comm.among([0, 1]).open_mailbox(comm, torch.ones(2))

    failure = simulate(2, absent).failures[0]
    assert isinstance(failure, MismatchError) and "it is none of ranks 1" in str(failure)
    with pytest.raises(ConfigError, match="mailboxes are among all simulated workers"):
        raise simulate(3, lambda comm: mailbox(comm) if comm.rank < 2 else None).failures[0]
