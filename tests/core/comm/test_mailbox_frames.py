# SPDX-License-Identifier: Apache-2.0
"""The wire format of messages, and the addresses to which they go."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rules import for_each
from thinwire import Comm, ConfigError, run_threads
from thinwire.core.comm.mailbox import frame, zeromq
from thinwire.core.comm.mailbox.frame import DamagedError, Header, Kind, bytes_of, dtype_number, parse

LIKE = torch.zeros(1000)

# -- frames ------------------------------------------------------------------------------------------------------------

PLACE: dict[str, int] = {"run": 2**63 + 1, "epoch": 3, "dst": 1}


def framed(x: Tensor, **changes: Any) -> list[memoryview]:
    data = bytes_of(x)
    header = Header(
        kind=Kind.MESSAGE, dtype=dtype_number(x), **{**PLACE, "src": 7}, topic=9, step=2**40, number=11,
        nbytes=data.nbytes,
    )._replace(**changes)  # fmt: skip
    return [memoryview(bytearray(header.pack())), *([memoryview(bytearray(data))] if data.nbytes else [])]


@for_each([torch.arange(5.0), torch.arange(12.0).view(3, 4).t(), torch.tensor([True]), LIKE[:0]])
def test_a_frame_is_read_back_as_it_was_written(x: Tensor) -> None:
    found = parse(framed(x), **PLACE)
    assert found is not None
    assert torch.equal(found[1], x.reshape(-1))
    assert (found[0].src, found[0].topic, found[0].step, found[0].number) == (7, 9, 2**40, 11)


def test_a_vector_that_is_too_short_too_long_or_missing_is_damage() -> None:
    parts = framed(torch.arange(5.0))
    for changed in ([parts[0], parts[1][:-4]], parts[:1], [*parts, memoryview(b"more")]):
        with pytest.raises(
            DamagedError, match=r"message 11 of rank 7 is damaged: it has \d+ bytes. Its header announces 20"
        ):
            parse(changed, **PLACE)


@for_each(
    [
        [b"GET / HTTP/1.1"],
        [b""],
        [b"x" * frame.HEADER_BYTES],
        framed(LIKE, run=5),
        framed(LIKE, epoch=4),
        framed(LIKE, dst=0),
        framed(LIKE, dtype=99),
        framed(LIKE, kind=99),
        [bytes([frame.VERSION + 1]) + bytes(framed(LIKE)[0][1:]), b""],
    ]
)
def test_what_is_not_meant_for_this_mailbox_is_foreign(parts: list[Any]) -> None:
    assert parse([memoryview(part) for part in parts], **PLACE) is None


# -- addresses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interface", "master", "found"),
    [("lo", "192.0.2.77", "127.0.0.1"), ("", "127.0.0.1", "127.0.0.1"), ("nothing0", "localhost", "127.0.0.1")],
)
def test_a_rank_is_reached_on_the_network_of_the_others(
    interface: str, master: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    monkeypatch.setenv("MASTER_ADDR", master)
    assert zeromq.own_address().replace("::1", "127.0.0.1") == found


def test_a_master_address_without_a_route_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setenv("MASTER_ADDR", "nobody.invalid")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR='nobody\.invalid': no route exists .*GLOO_SOCKET_IFNAME"):
        zeromq.own_address()


def test_an_address_that_only_its_own_machine_reaches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(comm: Comm) -> None:
        with pytest.raises(
            ConfigError, match=r"rank 1 is reached at tcp://127\.0\.0\.1:5001, which is valid on its own machine"
        ):
            zeromq._exchange_addresses(comm, 5000 + comm.rank, b"k" * 40, torch.device("cpu"))

    names = iter(["192.0.2.1", "127.0.0.1"])
    lock, given = threading.Lock(), dict[str, str]()

    def pretended() -> str:
        with lock:
            me = threading.current_thread().name
            return given.setdefault(me, next(names) if me not in given else given[me])

    monkeypatch.setattr(zeromq, "own_address", pretended)

    def rank_0_first(comm: Comm) -> None:
        if comm.rank == 0:
            pretended()
        comm.all_reduce_(torch.zeros(1)).wait()
        work(comm)

    run_threads(2, rank_0_first)


def test_an_ipv6_address_is_put_in_brackets() -> None:
    assert zeromq.endpoint("::1", 5) == "tcp://[::1]:5"
    assert zeromq.endpoint("10.77.0.1", 5) == "tcp://10.77.0.1:5"
