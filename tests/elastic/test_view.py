# SPDX-License-Identifier: Apache-2.0
"""Views and the rule by which survivors keep a round or repeat it; agreement in one store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from thinwire import CommError, CommTimeoutError, PeerLostError
from thinwire.core.view import Progress, View, last_kept_round
from thinwire.elastic.membership import Membership
from thinwire.elastic.threads import ThreadNetwork


@pytest.mark.parametrize(
    ("workers", "last"),
    [
        ([(5, True), (5, True), (5, True)], 5),
        ([(5, True), (5, False), (5, True)], 4),
        ([(5, False), (4, True), (4, True)], 4),
        # One has put the round back in a view that the others did not reach.
        ([(5, True), (5, True), (4, True)], 4),
    ],
)
def test_a_round_is_kept_only_where_all_survivors_have_its_result(workers: list[tuple[int, bool]], last: int) -> None:
    assert last_kept_round([Progress(number, done, 0) for number, done in workers]) == last


def test_a_view_that_cannot_be_read_is_an_error_in_words() -> None:
    with pytest.raises(CommError, match="cannot be read"):
        View.read({"members": [1]})


def entered(network: ThreadNetwork, names: str, timeout: float = 5.0) -> list[Membership]:
    members = [Membership(network.store, name, timeout=timeout, state=network.state) for name in names]
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda pair: pair[1].enter(pair[0], len(members)), enumerate(members)))
    return members


def test_all_survivors_get_one_view_whoever_proposes_it() -> None:
    network = ThreadNetwork()
    members = entered(network, "abcd")
    network.ended.add("b")
    with ThreadPoolExecutor(3) as pool:
        views = list(pool.map(lambda m: m.change(Progress(3, True, 7)), [m for m in members if m.worker != "b"]))
    assert views[0] == views[1] == views[2]
    assert views[0].members == ("a", "c", "d") and views[0].lost == ("b",) and views[0].epoch == 1
    for member in members:
        member.close()


def test_a_worker_that_answers_too_late_stops_and_no_second_view_exists() -> None:
    network = ThreadNetwork()
    members = entered(network, "abc", timeout=0.3)
    first = members[0].change(Progress(1, True, 1))  # b and c run, and do not answer
    assert first.members == ("a",)
    with pytest.raises(PeerLostError, match="continue as view 1 without this worker"):
        members[1].change(Progress(1, True, 1))
    for member in members:
        member.close()


def test_a_worker_that_does_not_come_is_named() -> None:
    network = ThreadNetwork()
    member = Membership(network.store, "a", timeout=0.2, state=network.state)
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 initial workers did not arrive"):
        member.enter(0, 2)
    member.close()


def test_who_asks_to_join_is_taken_in_when_the_others_say_so() -> None:
    network = ThreadNetwork()
    members = entered(network, "ab")
    late = Membership(network.store, "c", timeout=5.0, state=network.state)
    got: list[View] = []
    thread = threading.Thread(target=lambda: got.append(late.enter(0, 2)))
    thread.start()
    for _ in range(5000):
        if network.store.check(["join/1"]):
            break
        time.sleep(0.001)
    with ThreadPoolExecutor(2) as pool:
        views = list(pool.map(lambda m: m.change(Progress(2, True, 4), requests=1), members))
    thread.join(5)
    assert got == [views[0]] and views[0].members == ("a", "b", "c") and views[0].joined == ("c",)
    for member in [*members, late]:
        member.close()
