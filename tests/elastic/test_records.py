# SPDX-License-Identifier: Apache-2.0
"""What another program writes to the store of an elastic run changes nothing, and reaches no terminal as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.elastic.fleets import run_fleet, survivors
from tests.grids import fast_where
from thinwire import AllReduce, CommError, ConfigError, LocalSGD, Strategy, Worker
from thinwire.core.comm.liveness import ROW_BYTES
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.comm.roll_call import Failure
from thinwire.core.view import Progress, View, is_worker
from thinwire.elastic import fleet
from thinwire.elastic.membership import Membership
from thinwire.elastic.records import Records, run_token
from thinwire.elastic.threads import ThreadNetwork

ROW = "00" * ROW_BYTES


def view(store: Any) -> None:
    found = json.loads(store.get("view/0"))
    store.set("view/1", json.dumps({**found, "epoch": 1, "members": ["evil"], "rows": {"evil": ROW}}))


STRAY: dict[str, Callable[[Any], Any]] = {
    "another view": view,
    "no view": lambda store: store.set("view/1", "{nonsense"),
    "a view over one that was": lambda store: store.set("view/0", "{nonsense"),
    "no request": lambda store: store.set("join/1", "[1,2,3"),
    "a request of nobody": lambda store: store.set("join/1", json.dumps(["evil", "zz"])),
    "a request that clears the screen": lambda store: store.set("join/1", json.dumps(["\x1b[2J", ROW])),
    "a counter": lambda store: store.add("joins", 10**9),
    "a number of views": lambda store: store.set("epoch", str(10**12)),
    "a worker that is done": lambda store: store.set("next/1/w0", "null"),
    "bytes": lambda store: store.set("next/1/w1", b"\xff\xfe"),
    "a deep list": lambda store: store.set("next/1/w1", "[" * 100_000),
    "a step": lambda store: store.set("step/1", "10"),
    "facts": lambda store: store.set("facts/0", "[]"),
}


@pytest.mark.parametrize(
    "strategy", fast_where(lambda each: each == AllReduce(), [AllReduce(), LocalSGD(period=3)]), ids=str
)
@pytest.mark.parametrize("stray", STRAY)
def test_a_stray_write_to_the_store_changes_nothing(stray: str, strategy: Strategy) -> None:
    network, written = ThreadNetwork(), list[int]()

    def write(worker: Worker) -> None:
        if worker.elastic.worker_id == "w0" and worker.step == 2:
            STRAY[stray](network.store)
            written.append(worker.step)

    ends = survivors(run_fleet(2, strategy, steps=12, before=write, network=network))
    assert written == [2] and [end.epochs for end in ends] == [[(0, ("w0", "w1"))]] * 2
    assert torch.equal(ends[0].agreed, ends[1].agreed)  # type: ignore[arg-type]


@pytest.mark.parametrize("stray", ["a request of nobody", "no view", "a number of views", "a step", "facts"])
def test_a_worker_joins_in_spite_of_a_stray_write(stray: str) -> None:
    network, written = ThreadNetwork(), list[int]()

    def write(worker: Worker) -> None:
        if worker.elastic.worker_id == "w0" and worker.step == 2:
            STRAY[stray](network.store)
            written.append(worker.step)

    ends = survivors(run_fleet(2, AllReduce(), steps=40, joins=(3,), before=write, network=network))
    assert written == [2] and ends[0].epochs[-1] == (1, ("w0", "w1", "w2"))


def test_a_view_that_was_written_over_is_put_back_by_a_member_and_named_by_others() -> None:
    network = ThreadNetwork()
    member, other = (Membership(network.store, each, timeout=1, state=network.state) for each in "ab")
    first = View(0, ("a",), rows={"a": ROW})
    member._accept(member._propose(first))
    network.store.set("view/0", "{nonsense")
    other.view = View(1, ("b",))
    with pytest.raises(CommError, match="view 0 of this run cannot be read any more: another program"):
        other.history()
    assert member.history() == [first] and other._view_of(0) == first


def test_ids_and_processes_of_another_form_are_no_workers() -> None:
    assert is_worker(["0-ab12", ROW]) and is_worker(("a", ""))
    for found in (None, [], ["a"], ["a", 1], ["\x1b[2J", ROW], ["a" * 65, ROW], ["", ROW], ["a", "zz"], {"a": ROW}):
        assert not is_worker(found)
    with pytest.raises(CommError, match="cannot be read"):
        View.read(View(0, ("\x1b[2J",), rows={"\x1b[2J": ""}).content())
    assert Progress.read({"round": 1, "done": True, "step": 1, "left": "\x1b[2J" * 100}).left.startswith("?[2J?")
    assert len(Progress.read({"round": 1, "done": True, "step": 1, "left": "x" * 999}).left) == 200


def test_a_record_counts_under_its_own_key_and_token_only() -> None:
    store = memory_store()
    records, others = Records(store, b"a"), Records(store, b"b")
    records.write("one", {"members": ["a"]})
    assert json.loads(store.get("one"))["members"] == ["a"]
    store.set("two", store.get("one"))
    assert records.read("two") is None and others.read("one") is None
    assert records.propose("one", [], instead_of={"members": ["a"]}) == []
    assert records.propose("one", [1], instead_of=[2]) == []


def test_all_workers_of_a_run_have_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THINWIRE_TOKEN", raising=False)
    store: Any = memory_store()
    assert run_token(store) == run_token(store) and len(run_token(store)) == 32
    monkeypatch.setenv("THINWIRE_TOKEN", "secret")
    with pytest.raises(ConfigError, match=r"THINWIRE_TOKEN=\(set\) is not that of the run"):
        run_token(store)
    store = memory_store()
    assert run_token(store) == b"secret" and b"secret" not in store.get("token")
    monkeypatch.setenv("THINWIRE_TOKEN", "other")
    with pytest.raises(ConfigError, match=r"THINWIRE_TOKEN=\(set\) differs from that of the run"):
        run_token(store)
    monkeypatch.delenv("THINWIRE_TOKEN")
    with pytest.raises(ConfigError, match=r"THINWIRE_TOKEN=\(not set\) is not that of the run"):
        run_token(store)
    store.set("token", "junk")
    with pytest.raises(CommError, match="unreadable token"):
        run_token(store)


def test_connections_are_made_under_keys_that_strangers_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    for token in ("a", "b"):
        monkeypatch.setenv("THINWIRE_TOKEN", token)
        found = fleet.fleet_from_environment(memory_store())
        names.append(found.connector._named("group/0"))  # type: ignore[attr-defined]
    assert names[0] != names[1] and all(name.startswith("group/0-") and len(name) == 40 for name in names)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": "4", "RANK": "2"}, (2, 4)),
        ({"WORLD_SIZE": "4", "RANK": "2", "THINWIRE_WORKERS": "6", "THINWIRE_RANK": "5"}, (5, 6)),
    ],
)
def test_the_variables_of_the_run_go_before_those_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int]
) -> None:
    for name in ("THINWIRE_WORKERS", "THINWIRE_RANK", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = fleet.fleet_from_environment(memory_store())
    assert (found.rank, found.size) == expected


@pytest.mark.parametrize(
    "stored",
    [b"{nonsense", b"[1]", b'{"cause": "lost"}', b'{"cause": "x", "rank": 0, "step": 0}', b"[" * 100_000, b"\xff",
     b'{"cause": "lost", "rank": "0", "step": 0}', b'{"cause": "lost", "rank": 0, "step": 0, "text": 1}'],
    ids=range(8),
)  # fmt: skip
def test_what_is_no_failure_of_a_rank_is_a_value_error(stored: bytes) -> None:
    with pytest.raises(ValueError):
        Failure.read(stored)


def test_the_text_of_another_ranks_failure_cannot_control_a_terminal() -> None:
    found = Failure.read(
        json.dumps({"cause": "error", "rank": 0, "step": 0, "text": "a\x1b[2J\nb", "call": "\x07"}).encode()
    )
    assert (found.text, found.call) == ("a?[2J\nb", "?")
