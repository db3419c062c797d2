# SPDX-License-Identifier: Apache-2.0
"""Workers that reach the store, and not every other worker: they stop after a few views, and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.elastic.fleets import End, run_fleet, survivors
from thinwire import AllReduce, Comm, CommTimeoutError, LocalSGD, PeerLostError, PushSum, Strategy
from thinwire.core.comm import view_group
from thinwire.core.comm.group import GroupComm
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.comm.view_group import GlooConnector
from thinwire.core.view import Progress, View
from thinwire.elastic.membership import Membership
from thinwire.elastic.records import Records
from thinwire.elastic.rounds import Elastic
from thinwire.elastic.threads import ThreadConnector


class Cut:
    """Lets two workers not connect in views that have both, from a moment on, in so many views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pair: str, views: int = 8) -> None:
        self.pair, self.views, self.on = set(pair), views, False
        self.failed: set[int] = set()
        self.store: Any = None
        connect = ThreadConnector.connect

        def fails(one: ThreadConnector, epoch: Any, rank: int, size: int, timeout: float, lost: Any) -> Comm:
            self.store = Records(one._network.store, one._network.token)
            here = isinstance(epoch, int) and self.pair <= set(self.view(epoch).members)
            if not (self.on and here and one.worker in self.pair and len(self.failed | {epoch}) <= self.views):
                return connect(one, epoch, rank, size, timeout, lost)
            begin = time.monotonic()
            while (waited := time.monotonic() - begin) < timeout:
                # Later on it is the other one, whose time is up too.
                if waited < timeout / 2 and lost():
                    raise PeerLostError("a worker has given the view up")
                time.sleep(0.005)
            self.failed.add(epoch)
            raise CommTimeoutError("not all connected")

        monkeypatch.setattr(ThreadConnector, "connect", fails)

    def view(self, epoch: int) -> View:
        return View.read(self.store.read(f"view/{epoch}"))

    def falls(self, monkeypatch: pytest.MonkeyPatch, worker: str, step: int) -> None:
        """Cut the two apart as this worker has taken so many steps; an open connection breaks then."""
        before_step = Elastic.before_step

        def breaks(one: Elastic, hook: Callable[[], None]) -> None:
            if one.worker_id == worker and one.worker.step == step and not self.on:
                self.on = True
                one._connector.disconnect(one.comm.comm)
            before_step(one, hook)

        monkeypatch.setattr(Elastic, "before_step", breaks)


def agree(ends: list[End], members: tuple[str, ...]) -> None:
    assert [end.steps for end in ends] == [12] * len(members)
    for end in ends:
        assert end.agreed is not None and torch.equal(end.agreed, ends[0].agreed)  # type: ignore[arg-type]
        assert end.epochs[-1][1] == members


def test_a_joiner_that_does_not_reach_every_worker_gives_up_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = Cut(monkeypatch, "w1", "w2")
    cut.on = True
    ends = run_fleet(2, AllReduce(), steps=60, joins=(3,), timeout=0.6)
    stayed = survivors(ends[:2])
    assert [end.steps for end in stayed] == [60, 60]
    assert torch.equal(stayed[0].agreed, stayed[1].agreed)  # type: ignore[arg-type]
    assert stayed[0].epochs[-1][1] == ("w0", "w1")
    assert isinstance(ends[2].error, CommTimeoutError)
    for words in ("worker w2", "accepted 4 times", "firewalls", "GLOO_SOCKET_IFNAME", "not all connected"):
        assert words in str(ends[2].error)
    assert len(cut.failed) == 4


def test_a_try_to_join_does_not_count_where_another_worker_was_lost_or_left() -> None:
    own = Membership(memory_store(), "new", timeout=1)
    old = {each: Progress(3, True, 3) for each in "ab"}
    taken_in = View(4, ("a", "b", "new"), joined=("new",), progress=old)
    for _ in range(9):
        own._count_try(taken_in, View(5, ("a",), lost=("b", "new")), "")
        own._count_try(taken_in, View(5, ("a",), lost=("new",), left={"b": "SIGTERM"}), "")
    for _ in range(3):
        own._count_try(taken_in, View(5, ("a", "b"), lost=("new",)), "")
    with pytest.raises(CommTimeoutError, match="worker new: it was accepted 4 times"):
        own._count_try(taken_in, View(5, ("a", "b"), lost=("new",)), "")


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (AllReduce(), 2),
        (PushSum(), 3),
        *(
            pytest.param(strategy, size, marks=pytest.mark.slow)
            for strategy, size in ((AllReduce(), 3), (LocalSGD(period=3), 2), (LocalSGD(period=3), 3), (PushSum(), 2))
        ),
    ],
    ids=str,
)
def test_of_two_that_do_not_reach_each_other_one_stops_and_the_others_go_on(
    strategy: Strategy, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Cut(monkeypatch, "w0", "w1")
    cut.falls(monkeypatch, "w1", 5)
    ends = run_fleet(size, strategy, timeout=0.6)
    error = ends[1].error
    assert isinstance(error, CommTimeoutError)
    words = (
        f"3 views in a row with the same {size} workers",
        "w0, w1 did not reach",
        "firewalls",
        "GLOO_SOCKET_IFNAME",
    )
    assert all(each in str(error) for each in ("worker w1", *words))
    agree(survivors([ends[0], *ends[2:]]), ("w0", "w2")[: size - 1])
    assert len(cut.failed) == 3
    last = max(cut.failed) + 1  # that it stopped in
    assert cut.store.read(f"next/{last + 1}/w1") == "withdrawn", "gone at once, though its process may run on"
    assert cut.view(last + 1).lost == ("w1",)


def test_two_that_reach_each_other_again_soon_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Cut(monkeypatch, "w0", "w1", views=2)
    cut.falls(monkeypatch, "w1", 5)
    agree(survivors(run_fleet(3, AllReduce(), timeout=0.6)), ("w0", "w1", "w2"))
    assert len(cut.failed) == 2


@pytest.mark.parametrize(("told", "error"), [(True, PeerLostError), (False, CommTimeoutError)])
def test_who_reaches_all_others_is_not_one_that_does_not_connect(
    told: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for two others to reach each other, which say so; if nobody does, it may be this worker after all."""
    gather = GroupComm._gather_rows

    def silent(self: GroupComm, row: bytes) -> list[bytes]:
        return gather(self, row) if self.rank == 0 else [row, row]

    monkeypatch.setattr(GroupComm, "_gather_rows", silent)
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    before, given_up, connector = {*threading.enumerate()}, threading.Event(), GlooConnector(store)
    with ThreadPoolExecutor(2) as pool:
        waits = pool.submit(connector.connect, 0, 0, 2, 1.0, given_up.is_set)
        other = connector.connect(0, 1, 2, 1.0, given_up.is_set)
        if told:
            timer = threading.Timer(1.4, given_up.set)
            timer.start()
        with pytest.raises(error, match="connecting") as found:
            waits.result()
        assert type(found.value) is error
        connector.disconnect(other)
    del waits, other, found
    for thread in {*threading.enumerate()} - before:
        thread.join(20)


@pytest.mark.parametrize(
    ("problem", "told", "error"),
    [
        ("No route to host", False, CommTimeoutError),
        ("No route to host", True, PeerLostError),
        ("Connection closed by peer", False, CommTimeoutError),
    ],
)
def test_a_refused_connection_says_that_this_worker_does_not_reach_another(
    problem: str, told: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts among the views in a row that do not connect, unless another worker has given the view up."""

    def refuses(*_: Any) -> None:
        raise RuntimeError(problem)

    monkeypatch.setattr(view_group.dist, "ProcessGroupGloo", refuses)
    monkeypatch.setattr(view_group, "_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(view_group, "_TELL_SECONDS", 0.05)
    asked: list[int] = []

    def lost() -> bool:
        asked.append(1)
        return told and len(asked) > 1

    store: Any = memory_store()
    with pytest.raises(error, match=f"did not reach all others .{problem}") as found:
        view_group.ViewComm(store, 0, 2, timeout=5, lost=lost)
    assert type(found.value) is error
