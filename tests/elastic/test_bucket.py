# SPDX-License-Identifier: Apache-2.0
"""Elastic runs over a bucket: workers join, leave and are killed, by the same membership as over TCP."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("obstore")
pytest.importorskip("cryptography")

from tests.buckets import Process, environment, serve
from tests.elastic.chaos import SILENT_SECONDS, be_elsewhere
from tests.problems import flat
from tests.worker.test_rendezvous import build
from thinwire import attach
from thinwire.core.comm.bucket import BucketComm, BucketConnector
from thinwire.core.comm.liveness import State
from thinwire.core.storage.bucket import KEY, Bucket, BucketStore, new_key
from thinwire.core.view import Progress
from thinwire.elastic import membership
from thinwire.elastic.fleet import fleet_in_bucket
from thinwire.elastic.handover import Offered
from thinwire.elastic.membership import Membership
from thinwire.elastic.notice import Notice
from thinwire.errors import ConfigError


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())


def train(outbox: Any, url: str, recipe: str, stop: Path, timeout: float = 40, *, elsewhere: bool = False) -> None:
    """Train until the step in the file `stop`; answers with the number of workers after each change."""
    # Clocks of machines may differ and jump, so nothing may depend on one.
    time.time = random.Random(os.getpid()).random
    if elsewhere:
        be_elsewhere()
    model, optimizer = build()
    worker = attach(model, optimizer, recipe, rendezvous=url, timeout=timeout)
    assert worker.elastic is not None
    worker.elastic.on_view.append(lambda view: outbox.send((view.size, worker.step)))
    notice = Notice(worker, every=4, signals=[signal.SIGUSR1])
    outbox.send((worker.size, worker.step))
    until, asked = 1_000_000, stop.with_suffix(".asked")
    while worker.step < until:
        draw = torch.Generator().manual_seed(os.getpid() + worker.step)
        x = torch.randn(8, 5, generator=draw)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.02)
        if notice.leave():
            outbox.send("left")
            return
        if asked is not None and asked.exists():
            outbox.send(("at", worker.step))
            asked = None
        if stop.exists() and until == 1_000_000:
            until = int(stop.read_text())
            assert worker.step <= until, f"step {until} was named at step {worker.step}"
    with worker.consensus():
        outbox.send((flat(model).tolist(), flat(model).isfinite().all().item()))
    notice.close()
    worker.detach()


def until_size(worker: Process, size: int) -> None:
    """Wait until a worker is one of `size`."""
    while (found := worker.receive(60))[0] != size:
        assert not isinstance(found, str), found


def stop_all(workers: list[Process], stop: Path, more: int) -> None:
    """Let all workers end after the same step, `more` steps after the newest one that any of them reports."""
    stop.with_suffix(".asked").touch()
    steps = list[int]()
    for worker in workers:
        while (found := worker.receive(60))[0] != "at":  # a report of a view
            assert not isinstance(found, str), found
        steps.append(int(found[1]))
    stop.with_suffix(".new").write_text(str(max(steps) + more))
    stop.with_suffix(".new").rename(stop)


def check_changes(url: str, extra: dict[str, str], recipe: str, folder: Path) -> None:
    workers: list[Process] = []
    stop = folder / "stop"

    def add() -> Process:
        workers.append(Process(train, url, recipe, stop, extra={**extra, KEY: os.environ[KEY]}))
        return workers[-1]

    try:
        a = add()
        until_size(a, 1)
        b = add()
        until_size(a, 2)
        until_size(b, 2)
        c = add()
        for each in (a, b, c):
            until_size(each, 3)
        assert c.process.pid is not None and b.process.pid is not None
        os.kill(c.process.pid, signal.SIGKILL)
        for each in (a, b):
            until_size(each, 2)
        d = add()
        for each in (a, b, d):
            until_size(each, 3)
        os.kill(b.process.pid, signal.SIGUSR1)
        while b.receive(60) != "left":
            pass
        for each in (a, d):
            until_size(each, 2)
        stop_all([a, d], stop, 120)
        found = [each.receive(100) for each in (a, d)]
        assert found[0][1] and found[0] == found[1]
    finally:
        for each in workers:
            each.end()


@pytest.mark.parametrize("recipe", ["LocalSGD(period=4)"])
def test_workers_join_leave_and_are_killed_over_a_folder(recipe: str, tmp_path: Path) -> None:
    check_changes(f"file://{tmp_path}/run", {}, recipe, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    ["LocalSGD(period=4)", "DiLoCo(period=4, delay=2, codec=ErrorFeedback(Nearest(bits=4)))", "NoLoCo(period=4)"],
)
@pytest.mark.timeout(400)
def test_workers_join_leave_and_are_killed_over_s3(recipe: str, tmp_path: Path) -> None:
    with serve("weed", tmp_path) as endpoint:
        check_changes("s3://bucket/run", environment(endpoint), recipe, tmp_path)


def train_elsewhere(outbox: Any, url: str, stop: Path) -> None:
    """Train as on another machine, whose end only its heartbeats show."""
    train(outbox, url, "LocalSGD(period=4)", stop, SILENT_SECONDS, elsewhere=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_sleeps_longer_than_every_timeout_stops_and_joins_again(tmp_path: Path) -> None:
    url, stop = f"file://{tmp_path}/run", tmp_path / "stop"
    workers: list[Process] = []

    def add() -> Process:
        workers.append(Process(train_elsewhere, url, stop, extra={KEY: os.environ[KEY]}))
        return workers[-1]

    try:
        desktop = add()
        until_size(desktop, 1)
        laptop = add()
        for each in (desktop, laptop):
            until_size(each, 2)
        assert laptop.process.pid is not None
        os.kill(laptop.process.pid, signal.SIGSTOP)
        until_size(desktop, 1)
        time.sleep(SILENT_SECONDS + 1)
        os.kill(laptop.process.pid, signal.SIGCONT)
        told = laptop.receive(60)
        assert told.startswith("PeerLostError: ") and "Start it again to let it join" in told
        laptop = add()
        for each in (desktop, laptop):
            until_size(each, 2)
        stop_all([desktop, laptop], stop, 120)
        found = [each.receive(100) for each in (desktop, laptop)]
        assert found[0][1] and found[0] == found[1]
    finally:
        for each in workers:
            each.end()


def test_the_members_of_a_view_are_looked_at_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    size, most, active = 6, 0, 0
    buckets = [Bucket.open("memory://many") for _ in range(size)]
    members = [
        Membership(
            BucketStore(bucket, "0"),
            f"worker-{rank}",
            timeout=60,
            state=lambda _: State.UNKNOWN,
            beat_seconds=60,
            connected=False,
        )
        for rank, bucket in enumerate(buckets)
    ]
    with ThreadPoolExecutor(size) as pool:
        list(pool.map(lambda each: each.enter(None, size), members))
    request = buckets[0]._request

    async def late(call: Any, nbytes: int) -> Any:
        nonlocal most, active
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.02)
        active -= 1
        return await request(call, nbytes)

    monkeypatch.setattr(buckets[0], "_request", late)
    own, view = members[0], members[0].view
    assert view is not None
    for look in (own.given_up, lambda: own.are_gone(range(size)), lambda: own.gone(view.members, view)):
        most = 0
        assert not look() and most >= size - 1
    for each in members:
        each.close()


@pytest.mark.parametrize(
    ("recipe", "steps"),
    [
        ("DiLoCo(period=8, delay=4)", [4, 8, 12, 16]),
        ("DiLoCo(period=8, delay=4, codec=ErrorFeedback(Nearest(bits=4)))", [4, 6, 8, 12, 14, 16]),
        ("OverlapLocalSGD(period=8)", [8, 16]),
    ],
)
def test_steps_between_the_stages_of_a_mean_in_flight_send_nothing(
    recipe: str, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, calls = BucketComm._start, set[tuple[int, int]]()

    def counted(comm: BucketComm, *arguments: Any) -> Any:
        calls.add((comm.rank, comm.step))
        return start(comm, *arguments)

    monkeypatch.setattr(BucketComm, "_start", counted)

    def train_one(_: int) -> None:
        model, optimizer = build()
        worker = attach(model, optimizer, recipe, rendezvous=f"memory://quiet{len(steps)}", workers=2, elastic=True)
        while worker.step < 16:
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
        worker.detach()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train_one, range(2)))
    assert calls == {(rank, step) for rank in range(2) for step in [0, *steps]}


def test_workers_agree_on_a_view_although_the_store_was_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_STORE_SECONDS", 0.2)
    bucket = Bucket.open("memory://outage")

    def member(name: str) -> Membership:
        store = BucketStore(bucket, "0", seconds=0.1)
        return Membership(store, name, timeout=20, beat_seconds=0.05, poll_seconds=0.01, connected=False)

    members, down = [member("a"), member("b")], threading.Event()
    request = Bucket._request

    async def answer(bucket: Bucket, call: Any, nbytes: int) -> Any:
        if down.is_set():
            call.close()
            raise ConnectionError("no route to host")
        return await request(bucket, call, nbytes)

    monkeypatch.setattr(Bucket, "_request", answer)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda each: each.enter(None, 2), members))
        down.set()
        begin = time.monotonic()
        assert not members[0].given_up() and time.monotonic() - begin < 5
        changes = [pool.submit(each.change, Progress(0, done=True, step=0)) for each in members]
        time.sleep(1)
        down.clear()
        assert [each.result().epoch for each in changes] == [1, 1]
    members[1].close()
    assert members[0].given_up()
    members[0].close()


def test_a_view_that_the_store_does_not_show_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, hidden, get = Bucket.open("memory://lags"), 3, Bucket._get

    def member(name: str) -> Membership:
        return Membership(BucketStore(bucket, "0"), name, timeout=20, beat_seconds=0.05, connected=False)

    async def late(bucket: Bucket, name: str, most: int) -> bytes | None:
        nonlocal hidden
        hidden -= "/view/0/" in name
        return None if hidden > 0 else await get(bucket, name, most)

    a, b = member("a"), member("b")
    first = a.enter(None, 1)
    b.view = a.change(Progress(0, done=True, step=0))
    monkeypatch.setattr(Bucket, "_get", late)
    assert b.history() == [first, b.view]
    a.close()


def test_heartbeats_continue_where_a_record_is_damaged(tmp_path: Path) -> None:
    bucket = Bucket.open(f"file://{tmp_path}/run")
    member = Membership(BucketStore(bucket, "0"), "a", timeout=20, beat_seconds=0.02, connected=False)
    member.enter(None, 1)
    forged = tmp_path / "run" / "0" / "store" / "join" / "1" / "0"
    forged.parent.mkdir(parents=True)
    forged.write_bytes(b"forged")
    store = BucketStore(bucket, "0")
    seen = set[bytes]()
    end = time.monotonic() + 20
    while len(seen) < 5 and time.monotonic() < end:
        seen.update(store.values(["beat/a"]))
    member.close()
    assert len(seen) >= 5


def test_a_fixed_run_starts_again_when_a_worker_of_another_machine_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_GIVEN_UP_SECONDS", 1.0)
    bucket = Bucket.open("memory://silent")

    def member(name: str, timeout: float) -> Membership:
        return Membership(
            BucketStore(bucket, "0"),
            name,
            timeout=timeout,
            state=lambda _: State.UNKNOWN,
            beat_seconds=0.02,
            kind="fixed",
            connected=False,
        )

    first, second, third = (member(name, timeout) for name, timeout in [("a", 20), ("b", 0.3), ("c", 20)])
    assert first.enter(None, 1).members == ("a",)
    with pytest.raises(ConfigError, match="this run has 1 workers already, and all of them run"):
        second.enter(None, 1)
    first._ended.set()  # as by a power cut
    view = third.enter(None, 1)
    assert (view.epoch, view.begins, view.members) == (1, 1, ("c",))
    assert third.are_gone([0]) is False
    third.close()
    fourth = member("d", 20)
    assert fourth.enter(None, 1).epoch == 2  # at once, since the last one has announced its end
    fourth.close()


def test_a_joiner_does_not_wait_for_a_state_whose_sender_has_entered_another_view() -> None:
    bucket, entered = Bucket.open("memory://withdrawn"), threading.Event()

    def member(name: str) -> Membership:
        return Membership(BucketStore(bucket, "0"), name, timeout=600, beat_seconds=0.02, connected=False)

    donor, joiner = member("a"), member("b")
    connector = BucketConnector(bucket, "0/calls", lambda: "")
    assert donor.enter(None, 1).epoch == 0
    joiner.on_offer = Offered(joiner, connector).take

    def join() -> None:
        joiner.enter(None, 1)
        entered.set()

    threading.Thread(target=join, daemon=True).start()
    while donor.requests(now=True) < 1:
        time.sleep(0.01)
    early = {"name": "0/a/1/early", "kind": "early", "donor": "a", "row": donor.row, "epoch": 0}
    donor.offer(1, early)
    donor.change(Progress(0, done=True, step=0))
    assert donor.change(Progress(0, done=True, step=0), requests=1).members == ("a", "b")
    assert entered.wait(20)
    donor.close()
    joiner.close()


def test_a_number_of_the_environment_is_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THINWIRE_RANK", "1")
    found, fixed = fleet_in_bucket("memory://rank", workers=2)
    assert (found.rank, found.size, fixed) == (1, 2, True)
    found, fixed = fleet_in_bucket("memory://rank", workers=2, elastic=True)
    assert (found.rank, fixed) == (1, False)
    with pytest.raises(ConfigError, match=r"THINWIRE_RANK=1 of 1 workers: must lie in 0\.\.0"):
        fleet_in_bucket("memory://rank")


def test_a_run_whose_workers_have_ended_is_not_joined(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/run"
    model, optimizer = build()
    worker = attach(model, optimizer, "LocalSGD(period=2)", rendezvous=url)
    (model(torch.ones(1, 5)).sum()).backward()
    optimizer.step()
    worker.detach()
    second = Process(train, url, "LocalSGD(period=2)", tmp_path / "none", extra={KEY: os.environ[KEY]})
    try:
        told = second.receive(60)
        assert told.startswith("RunEndedError: ") and "`thinwire bucket clean` or use another path" in told
    finally:
        second.end(5)


def train_and_save(outbox: Any, url: str, folder: Path, until: int) -> None:
    """Train from the last checkpoint, if there is one, to a step; save, and wait."""
    model, optimizer = build()
    worker = attach(model, optimizer, "LocalSGD(period=4)", rendezvous=url, workers=2, elastic=True, timeout=40)
    if folder.exists():
        worker.load(folder)
    start = worker.step
    while worker.step < until:
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(100 * worker.step + worker.rank))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    worker.save(folder)
    with worker.consensus():
        outbox.send((start, worker.step, flat(model).tolist()))
    time.sleep(600)


def test_an_elastic_run_whose_workers_were_all_killed_starts_again_from_its_checkpoint(tmp_path: Path) -> None:
    url, folder, extra = f"file://{tmp_path}/run", tmp_path / "saved", {KEY: os.environ[KEY]}
    workers = [Process(train_and_save, url, folder, 6, extra=extra) for _ in range(2)]
    try:
        assert [each.receive(60)[:2] for each in workers] == [(0, 6)] * 2
        for each in workers:
            assert each.process.pid is not None
            os.kill(each.process.pid, signal.SIGKILL)
            each.process.join()
        workers.append(Process(train_and_save, url, folder, 12, extra=extra))
        told = workers[-1].receive(60)
        assert told.startswith("RunEndedError: ") and "and load a checkpoint" in told
        Bucket.open(url).clean(1.5)
        workers += [Process(train_and_save, url, folder, 12, extra=extra) for _ in range(2)]
        first, second = [each.receive(60) for each in workers[-2:]]
        assert first[:2] == (6, 12) and first == second
    finally:
        for each in workers:
            each.end()
