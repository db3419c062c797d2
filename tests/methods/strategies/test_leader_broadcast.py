# SPDX-License-Identifier: Apache-2.0
"""How leaders are elected and sent: the minimum of some numbers, and broadcasts that no rank sends twice."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch

from tests.pool import run_processes, start_processes
from thinwire import Comm, CountingComm, GroupComm, PeerLostError, run_threads
from thinwire.lab.emulate import Network, available, parse_links, run_workers

WIDTH = 700_001  # of fp32: three pieces, the last of odd length


def least(comm: Comm) -> list[int]:
    return comm.all_reduce_(torch.tensor([5 - comm.rank, comm.rank, -(2**62) + comm.rank]), op="min").wait().tolist()


def broadcasts() -> dict[str, bool]:
    """Vectors of several pieces from every rank, in several kinds, with two in flight."""
    comm = GroupComm(timeout=20)
    n = comm.size

    def drawn(rank: int, width: int = WIDTH) -> torch.Tensor:
        return torch.randn(width, generator=torch.Generator().manual_seed(rank))

    found = {f"from {j}": torch.equal(comm.broadcast_(drawn(comm.rank), j).wait(), drawn(j)) for j in range(n)}
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool):
        x = (drawn(comm.rank, 3 * WIDTH) * 9).to(dtype)
        found[str(dtype)] = torch.equal(comm.broadcast_(x, 1).wait(), (drawn(1, 3 * WIDTH) * 9).to(dtype))
    first, second = drawn(comm.rank), drawn(comm.rank + 10)
    works = [comm.broadcast_(first, 0), comm.broadcast_(second, 0)]
    for work in reversed(works):
        work.wait()
    found["two at once"] = torch.equal(first, drawn(0)) and torch.equal(second, drawn(10))
    table = drawn(comm.rank, 4 * WIDTH).view(4, WIDTH)
    comm.broadcast_(table[:, :-1], n - 1).wait()  # memory with gaps
    found["with gaps"] = torch.equal(table[:, :-1], drawn(n - 1, 4 * WIDTH).view(4, WIDTH)[:, :-1])
    found["least"] = least(comm) == [5 - n + 1, 0, -(2**62)]
    sent = comm.meter.by_operation
    found["bytes"] = sent["all_reduce_min"] == 24
    return found


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 4])
def test_long_vectors_arrive_whole_from_every_rank(n: int) -> None:
    for found in run_processes(n, broadcasts):
        assert all(found.values()), found


@pytest.mark.parametrize("n", [1, 2, 5])
def test_threads_find_the_least_of_their_numbers(n: int) -> None:
    def body(comm: Comm) -> tuple[list[int], float]:
        return least(comm), comm.meter.payload_bytes

    assert run_threads(n, body) == [([6 - n, 0, -(2**62)], 24 if n > 1 else 0)] * n


def test_a_wire_that_only_counts_counts_numbers_once() -> None:
    comm = CountingComm(1, 4)
    assert comm.all_reduce_(torch.tensor([3]), op="min").wait().tolist() == [3]
    assert comm.meter.by_operation == {"all_reduce_min": 8}


def lost_in_the_middle() -> str:
    comm = GroupComm(timeout=10)
    comm.all_reduce_(torch.zeros(1)).wait()
    if comm.rank == 1:
        os._exit(1)
    with pytest.raises(PeerLostError) as lost:
        for _ in range(20):
            comm.broadcast_(torch.zeros(4 * WIDTH), 0).wait()
            time.sleep(0.05)
    return str(lost.value)


def test_a_rank_lost_from_a_chain_is_named_by_all_others() -> None:
    workers = start_processes(4, lost_in_the_middle)
    deadline = time.monotonic() + 30
    for worker in workers:
        worker.finish(deadline)
    for rank in (0, 2, 3):
        assert workers[rank].error is None, workers[rank].error
        assert "rank 1 is lost" in workers[rank].result


# -- counted by interfaces ---------------------------------------------------------------------------------------------

SEND = """
import sys, torch, torch.distributed as dist
from thinwire import GroupComm
torch.set_num_threads(1)
dist.init_process_group("gloo")
comm = GroupComm(timeout=30)
for _ in range(int(sys.argv[1])):
    comm.broadcast_(torch.zeros(2_000_000), 2).wait()
comm.all_reduce_(torch.zeros(1)).wait()
dist.destroy_process_group()
"""


@pytest.mark.skipif(available() is not None, reason=str(available()))
@pytest.mark.emulation
@pytest.mark.slow
def test_a_broadcast_leaves_each_interface_once_and_the_last_one_never() -> None:
    nbytes, times = 8_000_000, 3
    with Network(parse_links("none", 4)) as network:
        exits = run_workers(
            [sys.executable, "-c", SEND, str(times)],
            4,
            network=network,
            environment={"OMP_NUM_THREADS": "1"},
            timeout=60,
        )
        vectors = [each.sent_bytes / (times * nbytes) for each in network.traffic()]
    assert [record.code for record in exits] == [0] * 4
    # The chain from rank 2: 2, 3, 0, 1. What the last one sends is acknowledgements.
    for rank in (2, 3, 0):
        assert 1.0 <= vectors[rank] < 1.08, vectors
    assert vectors[1] < 0.08, vectors
    assert sum(vectors) == pytest.approx(3, abs=0.25)
