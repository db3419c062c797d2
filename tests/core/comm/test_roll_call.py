# SPDX-License-Identifier: Apache-2.0
"""Which ranks are missing, found on stores that answer, do not answer, or are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from thinwire.core.comm import roll_call
from thinwire.core.comm.roll_call import Failure, RollCall


class DictStore:
    """A store within one process; `before` is called with each request."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.values: dict[str, str] = {}
        self.before = before
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.before(f"set {key}")
        self.values[key] = value

    def get(self, key: str) -> bytes:
        self.before(f"get {key}")
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        self.before(f"check {keys[0]}")
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.before(f"compare {key}")
        with self.lock:
            assert expected_value == ""
            return self.values.setdefault(key, desired_value).encode()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_ROLL_CALL_SECONDS", 0.3)
    monkeypatch.setattr(roll_call, "_LINGER_SECONDS", 0.2)
    monkeypatch.setattr(roll_call, "_STORE_SECONDS", 0.3)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def run(store: DictStore, rank: int, members: list[int], *, timed_out: bool = False) -> tuple[bool, list[str]]:
    call = RollCall(store, members, rank)
    found = call.run(failure(rank, timed_out=timed_out), lambda: None)
    return found.first.cause == "late", call.names(found.missing).split(", ") if found.missing else []


def failure(rank: int, *, timed_out: bool = False) -> Failure:
    return Failure("late" if timed_out else "lost", rank, step=5, call="all_reduce")


def together(
    store: DictStore, ranks: list[int], members: list[int], timed_out: list[int] | None = None
) -> list[tuple[bool, list[str]]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(run, store, rank, members, timed_out=rank in (timed_out or [])) for rank in ranks]
        return [call.result() for call in calls]


def gone(request: str) -> None:
    raise ConnectionResetError(request)


@contextmanager
def unresponsive() -> Iterator[Callable[[str], None]]:
    """A store that does not answer until the test is over."""
    over = threading.Event()
    yield lambda _: over.wait(30) and None
    over.set()


def test_no_rank_is_missing_if_all_set_their_keys() -> None:
    assert together(DictStore(), [0, 1, 2], [0, 1, 2]) == [(False, [])] * 3


def test_missing_ranks_are_named_by_their_rank_in_the_group_and_in_the_job() -> None:
    assert together(DictStore(), [0, 2], [0, 1, 2]) == [(False, ["rank 1"])] * 2
    assert together(DictStore(), [0], [5, 6, 7]) == [
        (False, ["rank 1 (rank 6 of the whole job)", "rank 2 (rank 7 of the whole job)"])
    ]


def test_all_ranks_report_the_first_cause() -> None:
    store = DictStore()
    assert run(store, 1, [0, 1], timed_out=True)[0]
    assert run(store, 0, [0, 1])[0]
    other = DictStore()
    assert not run(other, 0, [0, 1])[0]
    assert not run(other, 1, [0, 1], timed_out=True)[0]


def test_connections_are_closed_after_the_cause_is_stored_and_before_the_roll_call() -> None:
    calls: list[str] = []
    store = DictStore(calls.append)
    RollCall(store, [0, 1], 1).run(failure(1), lambda: calls.append("close"))
    assert calls[:3] == ["compare first", "close", "set here/1"]


def test_the_host_of_the_store_stays_until_the_others_have_read_it() -> None:
    calls: list[str] = []
    store = DictStore(calls.append)
    store.values.update({"here/1": "1", "here/2": "1"})
    threading.Timer(0.05, lambda: store.values.update({"done/1": "1", "done/2": "1"})).start()
    assert run(store, 0, [0, 1, 2]) == (False, [])
    assert calls.count("check done/2") > 1
    assert {"done/0", "done/1", "done/2"} <= set(store.values)


@pytest.mark.parametrize(("rank", "members", "missing"), [(1, [0, 1], [0]), (0, [0, 1], []), (1, [4, 5], [])])
def test_if_the_store_is_gone_the_first_rank_of_the_job_which_hosted_it_is_missing(
    rank: int, members: list[int], missing: list[int]
) -> None:
    closed: list[bool] = []
    found = RollCall(DictStore(gone), members, rank).run(failure(rank), lambda: closed.append(True))
    assert (found.first, found.missing) == (failure(rank), missing)
    assert closed == [True]


def test_a_store_that_the_launcher_hosts_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert run(DictStore(gone), 1, [0, 1]) == (False, [])


def test_if_the_store_does_not_answer_its_host_has_timed_out() -> None:
    closed: list[bool] = []
    with unresponsive() as block:
        found = RollCall(DictStore(block), [0, 1], 1).run(failure(1), lambda: closed.append(True))
    assert (found.first.cause, found.missing) == ("late", [0])
    assert closed == [True]


@pytest.mark.parametrize(("answered", "missing"), [(["here/2"], ["rank 0"]), (["here/0"], ["rank 2"])])
def test_if_the_store_ends_meanwhile_the_ranks_found_so_far_count(answered: list[str], missing: list[str]) -> None:
    requests = [0]

    def going(request: str) -> None:
        requests[0] += request.startswith("check")
        if requests[0] > 2:
            gone(request)

    store = DictStore(going)
    store.values.update(dict.fromkeys(answered, "1"))
    assert run(store, 1, [0, 1, 2]) == (False, missing)
