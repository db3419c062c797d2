# SPDX-License-Identifier: Apache-2.0
"""A comm over a bucket: the same bits as threads, few requests, and errors that name the ranks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import count_found, run_workers
from thinwire import Comm, attach, run_threads
from thinwire.core.comm import bucket as module
from thinwire.core.comm.bucket import SCATTER_BYTES, BucketComm
from thinwire.core.storage.bucket import KEY, Bucket, loop, new_key
from thinwire.errors import (
    CommError,
    CommTimeoutError,
    ConfigError,
    MismatchError,
    NonFiniteError,
    PeerLostError,
    ThinwireError,
)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())


def _every_call(comm: Comm) -> list[Tensor]:
    draw = torch.Generator().manual_seed(comm.rank)
    found: list[Tensor] = []
    for count in (0, 1, 1000, SCATTER_BYTES):
        for dtype in (torch.float32, torch.bfloat16):
            found.append(comm.all_reduce_(torch.randn(count, generator=draw).to(dtype)).wait())
    for shape in ((0,), (), (3, 4)):
        found += comm.all_gather(torch.randn(shape, generator=draw)).wait()
        found.append(comm.broadcast_(torch.randn(shape, generator=draw), comm.size - 1).wait())
    found.append(comm.all_reduce_(torch.randint(0, 99, (7,), generator=draw), op="min").wait())
    parts = [torch.randn(rank, generator=draw) for rank in range(comm.size)]
    found += comm.all_to_all(parts, [comm.rank] * comm.size).wait()
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    works = [comm.send_recv(torch.randn(5, generator=draw), [right], [left]) for _ in range(3)]
    for work in reversed(works):
        found += work.wait()
    found += comm.send_recv(
        torch.randn(2, generator=draw), [right] if comm.rank else [], [left] * (comm.rank != 1)
    ).wait()
    assert comm.check_in_step("a check", fingerprint=5).wait() == []
    comm.round = "a round"
    found.append(comm.all_reduce_(torch.randn(3, generator=draw)).wait())
    second = comm.duplicate() if isinstance(comm, BucketComm) else comm
    works = [each.all_reduce_(torch.randn(3, generator=draw)) for each in (comm, second)]
    return found + [work.wait() for work in reversed(works)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_call_returns_the_bits_that_threads_return(size: int, tmp_path: Path) -> None:
    expected = run_threads(size, _every_call)
    found = run_workers(f"file://{tmp_path}/run", size, _every_call)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))


def test_a_call_that_is_launched_just_before_the_comm_closes_ends() -> None:
    async def tasks() -> set[Any]:
        return asyncio.all_tasks() - {asyncio.current_task()}

    comm, held = BucketComm(Bucket.open("memory://closes"), "0", 0, 2), threading.Event()
    before = comm.bucket.wait(tasks())
    loop().call_soon_threadsafe(held.wait)
    work = comm.all_gather(torch.ones(1))  # its task cannot start yet
    comm.disconnect()
    held.set()
    with pytest.raises(ConfigError, match="was disconnected"):
        work.wait()
    end = time.monotonic() + 10
    while comm.bucket.wait(tasks()) - before:
        assert time.monotonic() < end, "it still reads"
        time.sleep(0.05)


def test_a_call_is_one_write_and_one_read_of_each_other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = count_found(monkeypatch)

    def work(comm: BucketComm) -> tuple[int, int, int, int]:
        def counts() -> tuple[int, int, int]:
            traffic = comm.bucket.traffic
            return traffic.puts, found[id(comm.bucket)], traffic.bytes_down

        comm.all_reduce_(torch.ones(3)).wait()
        before = counts()
        for _ in range(5):
            comm.round = "a round"
            comm.all_reduce_(torch.ones(1000)).wait()
        puts, gets, down = (after - first for after, first in zip(counts(), before, strict=True))
        return puts, gets, down, comm.meter.check_bytes

    for puts, gets, down, checks in run_workers("memory://requests", 3, work):
        assert (puts, gets, checks) == (5, 5 * 2, 0)
        assert 2 * 5 * 4000 <= down <= 1.05 * 2 * 5 * 4000


def test_a_large_sum_downloads_twice_the_vector_whatever_the_number_of_ranks() -> None:
    def work(comm: BucketComm) -> tuple[int, int]:
        before = comm.bucket.traffic.bytes_up, comm.bucket.traffic.bytes_down
        comm.all_reduce_(torch.ones(SCATTER_BYTES // 4)).wait()
        return comm.bucket.traffic.bytes_up - before[0], comm.bucket.traffic.bytes_down - before[1]

    for up, down in run_workers("memory://large", 4, work):
        assert up == pytest.approx(SCATTER_BYTES, rel=0.01)
        assert down == pytest.approx(1.5 * SCATTER_BYTES, rel=0.01)


def test_objects_that_all_ranks_have_read_are_deleted(tmp_path: Path) -> None:
    def work(comm: BucketComm) -> None:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        for _ in range(20):
            comm.all_reduce_(torch.ones(3)).wait()
            comm.send_recv(torch.ones(3), [right], [left]).wait()
            comm.all_to_all([torch.ones(1)] * comm.size, [1] * comm.size).wait()

    def exchange(comm: BucketComm) -> None:
        for _ in range(20):
            comm.send_recv(torch.ones(3), [1 - comm.rank], [1 - comm.rank]).wait()

    run_workers(f"file://{tmp_path}/run", 3, work)
    run_workers(f"file://{tmp_path}/pairs", 2, exchange)
    end = time.monotonic() + 10
    while len(left := [path for path in (tmp_path / "pairs" / "0").rglob("*") if path.is_file()]) > 2 * 3:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    while len(left := [path for path in (tmp_path / "run" / "0").rglob("*") if path.is_file()]) > 3 * 8:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_a_message_that_is_read_after_a_later_one_is_kept_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    get, shown = Bucket.get, threading.Event()

    async def late(self: Bucket, name: str, most: int, **more: Any) -> bytes | None:
        return None if name.endswith("p/0-1/0") and not shown.is_set() else await get(self, name, most, **more)

    def work(comm: BucketComm) -> list[float]:
        if comm.rank == 0:
            for value in (1.0, 2.0):
                comm.send_recv(torch.tensor([value]), [1], []).wait()
            comm.send_recv(torch.zeros(1), [], [1]).wait()  # whose header says what rank 1 has read
            shown.set()
            return []
        first, second = [comm.send_recv(torch.zeros(1), [], [0]) for _ in range(2)]
        found = second.wait()[0].item()
        comm.send_recv(torch.zeros(1), [0], []).wait()
        return [first.wait()[0].item(), found]

    monkeypatch.setattr(Bucket, "get", late)
    assert run_workers("memory://overtaken", 2, work, timeout=10) == [[], [1.0, 2.0]]


def test_a_wait_names_the_ranks_that_have_not_written() -> None:
    def work(comm: BucketComm) -> str:
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError) as caught:
                comm.all_reduce_(torch.ones(3)).wait()
            with pytest.raises(CommTimeoutError, match="the comm is closed after an earlier failure"):
                comm.all_reduce_(torch.ones(3))
            assert comm.has_failed()
            return str(caught.value)
        return ""

    comm_timeout = r"rank 0, step 0, all_reduce of 3 x float32: no answer within 1 s; ranks 1, 2 have not written"
    assert run_workers("memory://missing", 3, work, timeout=1)[0] == comm_timeout


def test_ranks_that_are_out_of_step_all_raise_the_same_error() -> None:
    def work(comm: BucketComm) -> str:
        comm.step, comm.round = (9 if comm.rank == 1 else 8), "an average"
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce_(torch.ones(3)).wait()
        return str(caught.value)

    first, *others = run_workers("memory://steps", 3, work)
    assert [first] * 2 == others
    assert "is in an average at step 8: all_reduce of 3 x float32" in first
    assert "rank 1 is in an average at step 9: all_reduce of 3 x float32" in first


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce_(torch.ones(3 + comm.rank)),
        lambda comm: comm.all_gather(torch.ones(3, dtype=[torch.float32, torch.int32][comm.rank])),
        lambda comm: comm.all_to_all([torch.ones(2)] * 2, [2, 3]),
        lambda comm: comm.send_recv(torch.ones(3 + comm.rank), [1 - comm.rank], [1 - comm.rank]),
        lambda comm: comm.all_reduce_(torch.ones(3)) if comm.rank else comm.check_in_step("save()"),
    ],
)
def test_different_calls_are_a_mismatch_on_all_ranks(call: Callable[[Comm], Any], request: Any) -> None:
    def work(comm: BucketComm) -> None:
        with pytest.raises(MismatchError, match="ranks are out of step"):
            call(comm).wait()

    run_workers(f"memory://{abs(hash(request.node.name))}", 2, work)


def test_an_error_that_one_rank_reports_is_raised_by_all() -> None:
    def work(comm: BucketComm) -> str:
        with pytest.raises(NonFiniteError) as caught:
            if comm.rank == 1:
                comm.raise_on_all(NonFiniteError("rank 1, step 0: the loss is nan"))
            comm.all_reduce_(torch.ones(2)).wait()
        return str(caught.value)

    assert run_workers("memory://reported", 3, work) == ["rank 1, step 0: the loss is nan"] * 3


def test_a_lost_rank_ends_a_wait_before_the_timeout_but_not_if_it_has_written() -> None:
    written = threading.Event()

    def work(comm: BucketComm) -> None:
        if comm.rank == 0:
            comm.broadcast_(torch.ones(3), 0).wait()
            written.set()
            return
        written.wait()
        assert comm.broadcast_(torch.zeros(3), 0).wait().tolist() == [1, 1, 1]
        with pytest.raises(PeerLostError, match=r"a worker is gone.*rank 0 has not written"):
            comm.broadcast_(torch.zeros(3), 0).wait()

    run_workers("memory://gone", 2, work, timeout=60, lost=lambda ranks: 0 in ranks)


def test_two_workers_of_one_rank_are_refused() -> None:
    first, second = (BucketComm(Bucket.open("memory://twice"), "0", 0, 2, timeout=30) for _ in range(2))
    first.broadcast_(torch.ones(1), 0).wait()
    with pytest.raises(CommError, match=r"exists already. Two workers have rank 0, or another run uses this path"):
        second.broadcast_(torch.ones(1), 0).wait()
    for each in (first, second):
        each.disconnect()
    with pytest.raises(ConfigError, match="this comm was disconnected"):
        first.all_reduce_(torch.ones(1))


def test_a_message_that_is_damaged_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unseal, damaged = Bucket._unseal, list[str]()

    def fail_once(self: Bucket, name: str, sealed: bytes) -> bytes:
        if name.startswith("0/") and name not in damaged:
            damaged.append(name)
            sealed = sealed[:-1] + bytes([sealed[-1] ^ 1])
        return unseal(self, name, sealed)

    monkeypatch.setattr(Bucket, "_unseal", fail_once)
    run_workers(f"file://{tmp_path}/run", 2, lambda comm: comm.all_reduce_(torch.ones(3)).wait())
    assert len(damaged) == 2


def test_a_replaced_message_is_refused_by_name(tmp_path: Path) -> None:
    def work(comm: BucketComm) -> None:
        if comm.rank == 1:
            path = tmp_path / "run" / "0" / "0" / "1"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\0" * 100)
            return
        with pytest.raises(CommError, match="run/0/0/1: this object is damaged, forged, or was moved here"):
            comm.all_reduce_(torch.ones(3)).wait()

    run_workers(f"file://{tmp_path}/run", 2, work)


def test_failed_requests_are_repeated_until_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    request, calls = Bucket._request, [0]

    async def fail_often(self: Bucket, call: Any, nbytes: int) -> Any:
        calls[0] += 1
        if calls[0] % 3:
            call.close()
            raise ConnectionError("500 Internal Server Error")
        return await request(self, call, nbytes)

    def work(comm: BucketComm) -> list[float]:
        barrier.wait()
        monkeypatch.setattr(Bucket, "_request", fail_often)
        return comm.all_reduce_(torch.tensor([float(comm.rank)])).wait().tolist()

    barrier = threading.Barrier(3)
    assert run_workers("memory://errors", 3, work) == [[3.0]] * 3


def test_a_store_that_is_down_is_a_timeout_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Bucket, call: Any, nbytes: int) -> Any:
        call.close()
        raise ConnectionError("503 Service Unavailable")

    comm = BucketComm(Bucket.open("memory://down"), "0", 0, 2, timeout=1)
    monkeypatch.setattr(Bucket, "_request", fail)
    with pytest.raises(CommTimeoutError, match="503 Service Unavailable"):
        comm.all_reduce_(torch.ones(1)).wait()


def test_a_call_that_has_failed_reads_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Bucket, name: str, sealed: bytes, *, create: bool) -> bool:
        raise ConnectionError("507 Insufficient Storage")

    bucket = Bucket.open("memory://quiet")
    comm = BucketComm(bucket, "0", 0, 3, timeout=0.5)
    monkeypatch.setattr(Bucket, "_put", fail)
    with pytest.raises(CommTimeoutError, match="507 Insufficient Storage"):
        comm.all_reduce_(torch.ones(1)).wait()
    gets = bucket.traffic.gets
    time.sleep(1)
    assert bucket.traffic.gets == gets


def test_a_comm_of_the_parent_is_refused_in_a_fork() -> None:
    comm = BucketComm(Bucket.open("memory://fork"), "0", 0, 2)
    if (child := os.fork()) == 0:
        try:
            comm.all_reduce_(torch.ones(1))
        except ThinwireError as error:
            os._exit(0 if "is a fork of rank 0" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    comm.disconnect()


def test_the_layout_of_a_header_survives() -> None:
    header = module._Header("all_reduce of 3 x float32", [1, 2, 3])
    assert module._Header.unpack(header.pack() + b"data", 3) == (header, b"data")


# -- a store with latency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "hidden"), [("DiLoCo(period=16, delay=12)", True), ("DiLoCo(period=16)", False)])
def test_reads_start_with_the_round_and_are_hidden_by_its_delay(
    recipe: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request takes two steps, by a clock that counts steps, and goes on while a worker is blocked."""
    clock, slow, barrier = [0], [False], threading.Barrier(2)
    blocked = list[int]()
    request = Bucket._request

    async def late(bucket: Bucket, call: Any, nbytes: int) -> Any:
        begin = clock[0]
        while slow[0] and clock[0] < begin + 2:
            await asyncio.sleep(0.001)
        return await request(bucket, call, nbytes)

    def ticking(futures: Any, timeout: float) -> Any:
        while slow[0] and not futures[0].done():
            blocked.append(clock[0])
            clock[0] += 1
            time.sleep(0.001)
        return wait(futures, timeout)

    monkeypatch.setattr(Bucket, "_request", late)
    monkeypatch.setattr(module, "wait", ticking)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.001)

    def work(comm: BucketComm) -> Tensor:
        model = torch.nn.ParameterList([torch.zeros(9)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = attach(model, optimizer, recipe, comm=comm)
        for _ in range(48):
            model[0].grad = torch.full((9,), float(comm.rank))
            optimizer.step()
            barrier.wait(20)
            slow[0] = worker.step > 3  # the first steps have messages of their own
            clock[0] += comm.rank
            time.sleep(0.02)  # for the thread of requests
        barrier.wait(20)
        slow[0] = False
        worker.detach()
        return model[0].detach()

    run_workers(f"memory://{recipe.replace(' ', '')}", 2, work)
    assert (not blocked) is hidden
