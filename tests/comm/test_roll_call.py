"""Who is still there, asked on stores that answer, keep silent, or are gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from thinwire.comm import roll_call
from thinwire.comm.roll_call import RollCall


class Words:
    """A store within one process; `before` is called with each question."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.words: dict[str, str] = {}
        self.before = before
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.before(f"set {key}")
        self.words[key] = value

    def check(self, keys: list[str]) -> bool:
        self.before(f"check {keys[0]}")
        return all(key in self.words for key in keys)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        self.before(f"compare {key}")
        with self.lock:
            assert expected_value == ""
            return self.words.setdefault(key, desired_value).encode()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roll_call, "_ROLL_CALL_SECONDS", 0.3)
    monkeypatch.setattr(roll_call, "_LINGER_SECONDS", 0.2)
    monkeypatch.setattr(roll_call, "_STORE_SECONDS", 0.3)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def hold(store: Words, rank: int, members: list[int], *, late: bool = False) -> tuple[bool, list[str]]:
    return RollCall(store, members, rank).hold(late, lambda: None)


def together(
    store: Words, ranks: list[int], members: list[int], late: list[int] | None = None
) -> list[tuple[bool, list[str]]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        calls = [pool.submit(hold, store, rank, members, late=rank in (late or [])) for rank in ranks]
        return [call.result() for call in calls]


def gone(question: str) -> None:
    raise ConnectionResetError(question)


@contextmanager
def silent() -> Iterator[Callable[[str], None]]:
    """A store that answers nothing until the test is over."""
    over = threading.Event()
    yield lambda _: over.wait(30) and None
    over.set()


def test_nobody_is_missing_where_all_answer() -> None:
    assert together(Words(), [0, 1, 2], [0, 1, 2]) == [(False, [])] * 3


def test_those_who_do_not_answer_are_missing_by_both_their_ranks() -> None:
    assert together(Words(), [0, 2], [0, 1, 2]) == [(False, ["rank 1"])] * 2
    assert together(Words(), [0], [5, 6, 7]) == [
        (False, ["rank 1 (rank 6 of the whole job)", "rank 2 (rank 7 of the whole job)"])
    ]


def test_the_first_reason_is_everyone_s() -> None:
    store = Words()
    assert hold(store, 1, [0, 1], late=True)[0]
    assert hold(store, 0, [0, 1])[0]
    other = Words()
    assert not hold(other, 0, [0, 1])[0]
    assert not hold(other, 1, [0, 1], late=True)[0]


def test_connections_are_closed_when_the_reason_can_be_read_and_before_the_roll_is_called() -> None:
    heard: list[str] = []
    store = Words(heard.append)
    RollCall(store, [0, 1], 1).hold(False, lambda: heard.append("hang up"))
    assert heard[:3] == ["compare reason", "hang up", "set here/1"]


def test_the_host_of_the_store_stays_until_the_others_have_read() -> None:
    heard: list[str] = []
    store = Words(heard.append)
    store.words.update({"here/1": "1", "here/2": "1"})
    threading.Timer(0.05, lambda: store.words.update({"done/1": "1", "done/2": "1"})).start()
    assert hold(store, 0, [0, 1, 2]) == (False, [])
    assert heard.count("check done/2") > 1
    assert {"done/0", "done/1", "done/2"} <= set(store.words)


@pytest.mark.parametrize(("rank", "members", "missing"), [(1, [0, 1], ["rank 0"]), (0, [0, 1], []), (1, [4, 5], [])])
def test_a_store_that_is_gone_was_hosted_by_the_first_rank_of_the_job(
    rank: int, members: list[int], missing: list[str]
) -> None:
    closed: list[bool] = []
    assert RollCall(Words(gone), members, rank).hold(False, lambda: closed.append(True)) == (False, missing)
    assert closed == [True]


def test_a_store_of_the_launcher_s_blames_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert hold(Words(gone), 1, [0, 1]) == (False, [])


def test_a_store_that_keeps_silent_has_a_host_that_is_late() -> None:
    closed: list[bool] = []
    with silent() as nothing:
        found = RollCall(Words(nothing), [0, 1], 1).hold(False, lambda: closed.append(True))
    assert found == (True, ["rank 0"])
    assert closed == [True]


@pytest.mark.parametrize(("answered", "missing"), [(["here/2"], ["rank 0"]), (["here/0"], ["rank 2"])])
def test_a_store_that_goes_during_the_call_leaves_what_is_known_so_far(answered: list[str], missing: list[str]) -> None:
    asked = [0]

    def going(question: str) -> None:
        asked[0] += question.startswith("check")
        if asked[0] > 2:
            gone(question)

    store = Words(going)
    store.words.update(dict.fromkeys(answered, "1"))
    assert hold(store, 1, [0, 1, 2]) == (False, missing)
