# SPDX-License-Identifier: Apache-2.0
"""The protocol of views on its own, and the connections of a view that does not come about."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from thinwire.core.comm.liveness import State
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.comm.roll_call import within
from thinwire.core.comm.view_group import GlooConnector
from thinwire.core.view import Progress
from thinwire.elastic import membership
from thinwire.elastic.membership import Membership, RunEndedError
from thinwire.errors import PeerLostError


class LateHint:
    """A store in which the number of the newest view is not there yet."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        if key != "epoch":
            self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_who_is_left_out_of_a_view_does_not_enter_an_older_one_again() -> None:
    store, gone = LateHint(memory_store()), set[str]()

    def state(worker: str) -> State:
        return State.ENDED if worker in gone else State.RUNNING

    members = {each: Membership(store, each, timeout=10, state=state, beat_seconds=0.02) for each in "abcd"}
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda rank: members["abcd"[rank]].enter(rank, 4), range(4)))
            ready, new = Progress(3, done=True, step=9), Progress(0, done=True, step=0, ready=False)
            gone.add("c")
            waits = pool.submit(members["d"].change, new)
            stay = list(pool.map(lambda each: members[each].change(ready), "ab"))
            assert [view.members for view in stay] == [("a", "b"), ("a", "b")]
            gone.update("ab")
            # It asks again; with the others gone there is nothing that it could enter.
            with pytest.raises(RunEndedError, match="all workers of its last view, 1, are gone"):
                waits.result()
    finally:
        for each in members.values():
            each.close()


@pytest.mark.slow
def test_a_store_answers_while_a_group_that_nobody_waits_for_any_more_still_connects() -> None:
    """Gloo waits for the keys of workers that are gone until its timeout, and cannot be stopped."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    gone = threading.Event()
    before = {*threading.enumerate()}
    threading.Timer(0.3, gone.set).start()
    with pytest.raises(PeerLostError, match="a worker of this view is gone, or has abandoned the view"):
        GlooConnector(store).connect(1, 0, 2, 4, gone.is_set)
    within(2, lambda: store.set("still", "there"))
    assert store.get("still") == b"there"
    for thread in {*threading.enumerate()} - before:
        thread.join(10)


def send_and_wait(comm: Any) -> None:
    comm.send_recv(torch.zeros(3), [], [1]).wait()


def reduce(comm: Any) -> None:
    comm.all_reduce_(torch.zeros(3)).wait()


@pytest.mark.parametrize("call", [send_and_wait, reduce])
def test_a_wait_ends_when_its_view_has_been_given_up_though_no_connection_was_closed(
    call: Callable[[Any], None],
) -> None:
    """As on a busy link, where the word of the lost worker's kernel has got lost."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    before, given_up, connector = {*threading.enumerate()}, threading.Event(), GlooConnector(store)
    with ThreadPoolExecutor(2) as pool:
        waits, silent = pool.map(lambda rank: connector.connect(0, rank, 2, 5, given_up.is_set), range(2))
        threading.Timer(0.6, given_up.set).start()
        with pytest.raises(
            PeerLostError, match=r"rank 0, step 0, .*: a worker of this view is gone, or has abandoned the view"
        ):
            # Less than Gloo's own timeout, which its threads wait for.
            within(3, partial(call, waits))
        assert given_up.is_set()
        connector.disconnect(silent)
    del waits, silent
    for thread in {*threading.enumerate()} - before:
        thread.join(20)


def test_a_view_is_given_up_by_who_registers_for_the_next_one_and_not_for_a_store_that_is_gone() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    store, gone = memory_store(), set[str]()

    def state(worker: str) -> State:
        return State.ENDED if worker in gone else State.RUNNING

    a, b = (Membership(store, each, timeout=10, state=state, beat_seconds=0.02) for each in "ab")
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one[1].enter(one[0], 2), enumerate((a, b))))
        assert not a.given_up()
        b.register(Progress(1, done=True, step=1, left="notice"))
        assert a.given_up() and not b.given_up()
        b._store = Gone()  # type: ignore[assignment]
        assert not b.given_up()
        gone.add("a")
        assert b.given_up()
    finally:
        a.close()
        b.close()


def test_a_worker_elsewhere_that_is_silent_for_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine has lost its power: no connection is closed."""
    monkeypatch.setattr(membership, "_GIVEN_UP_SECONDS", 2.0)
    store = memory_store()
    a, b = (Membership(store, each, timeout=10, beat_seconds=0.02) for each in "ab")
    b.row = bytes(len(bytes.fromhex(b.row))).hex()  # of another machine
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one[1].enter(one[0], 2), enumerate((a, b))))
        for _ in range(5):
            assert not a.given_up()
            time.sleep(0.1)
        b.close()
        end = time.monotonic() + 20
        while not a.given_up():
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        a.close()
        b.close()


def test_a_remote_worker_has_ended_if_its_heartbeat_stops_for_the_given_or_the_default_seconds() -> None:
    member = Membership(memory_store(), "a", timeout=1, beat_seconds=1.0, state=lambda _: State.UNKNOWN)
    silences = iter([7.9, 8.1, 8.1, 2.1])
    member.heartbeats = lambda workers: [(next(silences), "") for _ in workers]  # type: ignore[method-assign,assignment]
    try:
        assert member.state_of("b", "") is State.UNKNOWN
        assert member.state_of("b", "") is State.ENDED  # eight beats
        assert member.states_of({"b": ""}, 20.0) == {"b": State.UNKNOWN}
        assert member.states_of({"b": ""}, 2.0) == {"b": State.ENDED}
    finally:
        member.close()
