# SPDX-License-Identifier: Apache-2.0
"""How a run begins, begins anew, and goes on without a worker that could not start; the protocol on its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import thinwire
from tests.engine import batch, momentum, net
from thinwire import ConfigError, Hypercube, PushSum
from thinwire.core.comm.liveness import State
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.view import Progress, View
from thinwire.elastic.membership import Membership, RunEndedError
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork
from thinwire.errors import CommTimeoutError, PeerLostError

READY = Progress(0, done=True, step=0)


class Run:
    """A store, its workers, and which of them are gone."""

    def __init__(self) -> None:
        self.store: Any = memory_store()
        self.gone = set[str]()
        self.made: list[Membership] = []

    def member(self, worker: str, *, timeout: float = 10.0) -> Membership:
        state: Callable[[str], State] = lambda each: State.ENDED if each in self.gone else State.RUNNING  # noqa: E731
        made = Membership(self.store, worker, timeout=timeout, state=state, beat_seconds=0.02)
        self.made.append(made)
        return made

    def begin(self, *members: Membership) -> list[View]:
        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(lambda one: one[1].enter(one[0], len(members)), enumerate(members)))

    def end(self, *members: Membership) -> None:
        for member in members:
            self.gone.add(member.worker)
            member.close()


@pytest.fixture
def run() -> Generator[Run]:
    made = Run()
    yield made
    made.end(*made.made)


def test_a_run_whose_workers_are_all_gone_before_a_step_begins_anew(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    assert [view.epoch for view in run.begin(*first)] == [0, 0]
    run.end(*first)
    again = [run.member(each) for each in "cd"]
    views = run.begin(*again)
    assert views[0] == views[1]
    assert (views[0].epoch, views[0].begins, views[0].members) == (1, 1, ("c", "d"))
    assert again[0].history() == [views[0]]
    for each in again:
        each.take_step()


def test_one_that_has_withdrawn_is_gone_though_its_process_runs(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)
    for each in first:
        each.withdraw()
    assert run.begin(run.member("c"), run.member("d"))[0].members == ("c", "d")


def test_a_run_does_not_begin_anew_while_one_of_its_workers_is_there(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)
    run.end(first[0])
    with pytest.raises(CommTimeoutError, match="did not accept this worker within"):
        run.member("c", timeout=0.2).enter(0, 2)


def test_a_run_in_which_a_step_was_taken_does_not_begin_anew(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)
    first[0].take_step()
    run.end(*first)
    with pytest.raises(RunEndedError, match="all workers of its last view, 0, are gone"):
        run.member("c").enter(0, 2)


def test_a_worker_that_was_taken_for_lost_takes_no_step_of_a_run_that_has_begun_anew(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)
    run.gone.update("ab")  # so it looks
    run.begin(run.member("c"), run.member("d"))
    with pytest.raises(PeerLostError, match="the others have restarted the run"):
        first[0].take_step()


def test_who_gave_up_asking_to_join_is_not_taken_in(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)
    late = run.member("c", timeout=0.2)
    with pytest.raises(CommTimeoutError, match="did not accept this worker within"):
        late.enter(0, 2)
    with ThreadPoolExecutor(3) as pool:
        again = pool.submit(run.member("d").enter, 0, 2)  # as in the same process, which runs on
        while first[0].requests(now=True) < 2 or not first[0].asked(2):
            time.sleep(0.01)
        views = [pool.submit(each.change, READY, requests=2) for each in first]
        assert {view.result().members for view in [*views, again]} == {("a", "b", "d")}


def test_who_gives_up_just_as_the_others_agree_on_a_view_with_it_is_gone_in_that_view(run: Run) -> None:
    first = [run.member(each) for each in "ab"]
    run.begin(*first)

    # Both have read the request when it is withdrawn, and the view is written after that.
    late = run.member("c")
    number = late.request()
    asked = first[0].asked(number)
    late.withdraw()
    assert first[0].asked(number) == {}
    with pytest.MonkeyPatch.context() as patch:
        for each in first:
            patch.setattr(each, "asked", lambda _: asked)
        with ThreadPoolExecutor(2) as pool:
            views = [pool.submit(each.change, READY, requests=number) for each in first]
            assert {view.result().members for view in views} == {("a", "b", "c")}
    assert first[0].given_up(), "nobody waits for it"
    with ThreadPoolExecutor(2) as pool:
        views = [pool.submit(each.change, READY) for each in first]
        assert {view.result().members for view in views} == {("a", "b")}


def test_who_gives_up_just_as_a_run_begins_with_it_is_gone_in_that_run(run: Run) -> None:
    a, b = run.member("a", timeout=0.1), run.member("b")
    with pytest.raises(CommTimeoutError, match="rank 1 of 2 initial workers did not arrive"):
        a.enter(0, 2)
    # Another one had seen its place before.
    rows = {each.worker: each.row for each in (a, b)}
    b.view = b._propose(View(0, ("a", "b"), rows=rows, begins=0))
    assert b.given_up()


def test_who_gives_up_before_a_run_begins_leaves_its_place(run: Run) -> None:
    with pytest.raises(CommTimeoutError):
        run.member("a", timeout=0.1).enter(0, 2)
    assert run.begin(run.member("b"), run.member("c"))[0].members == ("b", "c")


def test_attach_that_has_failed_on_all_can_be_repeated_in_the_same_run() -> None:
    network = ThreadNetwork()

    def train(rank: int) -> tuple[int, int, tuple[str, ...]]:
        model = net()
        optimizer = momentum(model)
        refused = network.fleet(f"{rank}-first", rank, 3)
        with pytest.raises(ConfigError, match="needs a power of two"):
            thinwire.attach(model, optimizer, PushSum(Hypercube()), elastic=refused)
        fleet = network.fleet(f"{rank}-again", rank, 3)
        try:
            worker = thinwire.attach(model, optimizer, PushSum(), elastic=fleet)
            for number in range(3):
                x, y = batch(rank, number)
                optimizer.zero_grad()
                (model(x) - y).square().mean().backward()
                optimizer.step()
            with worker.consensus():
                return worker.step, worker.view.begins, worker.view.members
        finally:
            assert isinstance(fleet.connector, ThreadConnector)
            fleet.connector.end()
            fleet.membership.close()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(train, range(3))) == [(3, 1, ("0-again", "1-again", "2-again"))] * 3
