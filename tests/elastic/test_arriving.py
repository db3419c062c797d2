# SPDX-License-Identifier: Apache-2.0
"""A worker that joins gets its state while the others train, and changes no mean before it has trained itself."""

from __future__ import annotations

import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.fleets import End, KilledError, run_fleet, survivors
from tests.grids import fast_where, one_of_each
from thinwire import (
    QSGD,
    AllReduce,
    Comm,
    ConfigError,
    DiLoCo,
    ErrorFeedback,
    LocalSGD,
    OneBit,
    PeerLostError,
    PushSum,
    SlowMo,
    Strategy,
    Worker,
)
from thinwire.core.comm.rendezvous import memory_store
from thinwire.core.storage.rank_file import RankFile
from thinwire.core.view import Progress, View
from thinwire.elastic import handover, patience
from thinwire.elastic.membership import Membership, RunEndedError
from thinwire.elastic.rounds import Elastic
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork
from thinwire.worker import checkpoint

ROUNDS: list[Strategy] = [
    LocalSGD(period=3),
    LocalSGD(period=3, weights="samples"),
    LocalSGD(period=3, codec=QSGD(8)),
    SlowMo(period=3),
    DiLoCo(period=3),
    DiLoCo(period=3, codec=ErrorFeedback(OneBit(8))),
]
STEPS = 60


def joined(ends: list[End]) -> int:
    """The step at which the last worker entered, with the parameters that the others had there."""
    assert ends[-1].epochs[-1][1] == ends[0].epochs[-1][1]
    step = min(ends[-1].trace)
    assert torch.equal(ends[-1].trace[step], ends[0].trace[step])
    return step


@pytest.mark.parametrize("strategy", one_of_each(ROUNDS), ids=str)
def test_a_joiner_enters_with_the_result_of_a_round_that_it_has_not_changed(strategy: Strategy) -> None:
    alone = run_fleet(2, strategy, steps=STEPS)
    ends = survivors(run_fleet(2, strategy, joins=(3,), steps=STEPS))
    step = joined(ends)
    assert step % 3 == 0 and step > 3
    # Codes are rounded in other pieces where there are more workers.
    tolerance = 0.02 if "codec=QSGD" in str(strategy) else 0.0
    for at in range(step + 1):
        assert torch.allclose(ends[0].trace[at], alone[0].trace[at], rtol=0, atol=tolerance), at
    if step < STEPS:
        assert not torch.equal(ends[0].trace[STEPS], alone[0].trace[STEPS]), "then its steps count as all others'"
    assert all(torch.equal(end.trace[STEPS], ends[0].trace[STEPS]) for end in ends)


def test_a_joiner_waits_for_the_whole_state_where_a_round_ends_without_a_mean() -> None:
    ends = survivors(run_fleet(2, SlowMo(period=3, exact=False), joins=(3,), steps=STEPS))
    step = min(ends[-1].trace)
    assert step < STEPS and all(end.epochs[-1] == ends[0].epochs[-1] for end in ends)
    assert ends[-1].trace[step].abs().sum() > 0


def test_learning_rates_that_change_in_the_round_are_those_of_the_others() -> None:
    """Slow momentum divides by the mean rate of the round, which the new worker has not seen."""

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        found = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        torch.optim.lr_scheduler.ExponentialLR(found, 0.9)

        def fall(*_: Any) -> None:
            found.param_groups[0]["lr"] *= 0.9

        found.register_step_post_hook(fall)
        return found

    ends = survivors(run_fleet(2, SlowMo(period=4), joins=(3,), steps=STEPS, optimizer=optimizer))
    assert joined(ends) > 3
    assert all(torch.equal(end.trace[STEPS], ends[0].trace[STEPS]) for end in ends)


def test_the_others_train_on_while_the_state_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    sent = handover.send

    def slow(comm: Comm, content: torch.Tensor, dst: int) -> None:
        if comm.size == 2 and comm.step == 0:  # a pair of their own
            assert told.wait(20)
        sent(comm, content, dst)

    class Loud(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Loud.steps += 1
            if Loud.steps == 40:
                told.set()
            return super().step(closure)

    monkeypatch.setattr(handover, "send", slow)
    ends = survivors(
        run_fleet(2, LocalSGD(period=3), joins=(3,), steps=150, optimizer=lambda m: Loud(m.parameters(), lr=0.05))
    )
    assert joined(ends) >= 18, "at least the 40 steps of two workers"


def test_a_view_that_some_open_before_a_round_and_others_in_it_leaves_all_in_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One worker fails before the average, the other one in it, where the first is missing."""
    agreed, failed = handover.Arrivals.agree, [False]

    def breaks(self: handover.Arrivals, comm: Comm) -> None:
        agreed(self, comm)
        if comm.rank == 0 and not failed[0]:
            failed[0] = True
            raise PeerLostError("a connection was closed")

    monkeypatch.setattr(handover.Arrivals, "agree", breaks)
    ends = survivors(run_fleet(3, LocalSGD(period=3), joins=(3,), steps=STEPS))
    assert failed[0]
    assert all(torch.equal(end.trace[STEPS], ends[0].trace[STEPS]) for end in ends)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_joiner_whose_sender_is_lost_gets_the_state_in_the_next_view(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, calls = handover.send, [0]

    def breaks(comm: Comm, content: torch.Tensor, dst: int) -> None:
        calls[0] += 1
        if calls[0] == fails_at:
            raise PeerLostError("a connection was closed")
        sent(comm, content, dst)

    monkeypatch.setattr(handover, "send", breaks)
    ends = survivors(run_fleet(2, SlowMo(period=3), joins=(3,), steps=STEPS))
    assert joined(ends) < STEPS
    assert all(torch.equal(end.trace[STEPS], ends[0].trace[STEPS]) for end in ends)


def test_workers_wait_longer_than_a_round_for_one_that_gets_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learned timeouts are of rounds, and a state may take longer to arrive."""
    monkeypatch.setattr(patience, "_FLOOR_SECONDS", 0.2)
    sent = handover.send

    def slow(comm: Comm, content: torch.Tensor, dst: int) -> None:
        time.sleep(0.6)
        sent(comm, content, dst)

    monkeypatch.setattr(handover, "send", slow)
    ends = survivors(run_fleet(2, AllReduce(), joins=(12,), steps=STEPS))
    assert joined(ends) < STEPS
    assert [epoch for epoch, _ in ends[0].epochs] == [0, 1], "nobody was given up meanwhile"


def test_a_joiner_that_cannot_connect_since_another_is_lost_comes_in_with_the_next_view(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect, failed = ThreadConnector.connect, [False]

    def fails(self: ThreadConnector, *arguments: Any) -> Comm:
        comm = connect(self, *arguments)
        if self.worker == "w2" and not failed[0]:
            failed[0] = True
            self.disconnect(comm)
            raise PeerLostError("a worker of the new view is gone")
        return comm

    monkeypatch.setattr(ThreadConnector, "connect", fails)
    for strategy in (AllReduce(), LocalSGD(period=3)):
        failed[0] = False
        ends = survivors(run_fleet(2, strategy, joins=(3,), steps=STEPS))
        assert joined(ends) < STEPS and failed[0]


BETWEEN: list[Strategy] = [AllReduce(), LocalSGD(period=3), SlowMo(period=3, exact=False), DiLoCo(period=3), PushSum()]


@pytest.mark.parametrize(
    ("strategy", "first"),
    # Each strategy in one of the two orders, in turn.
    fast_where(lambda each: BETWEEN.index(each[0]) % 2 == each[1], product(BETWEEN, (False, True))),
    ids=str,
)
def test_a_worker_joins_while_the_others_evaluate_and_save(strategy: Strategy, first: bool, tmp_path: Path) -> None:
    """It makes none of the calls after the step at whose end it joins, or all of them on its own."""
    alone: list[int] = []

    def calls(worker: Worker) -> None:
        with worker.consensus():
            pass
        if worker.step % 3 == 0:
            if worker.elastic.has_just_joined:
                alone.append(worker.step)
            worker.save(tmp_path, keep=None)

    hook: dict[str, Any] = {"before" if first else "after": calls}
    ends = survivors(run_fleet(2, strategy, joins=(3,), steps=48, **hook))
    assert [len(end.epochs[-1][1]) for end in ends] == [3] * len(ends)
    agreed = [end.agreed for end in ends]
    assert all(x is not None and torch.equal(x, agreed[0]) for x in agreed)  # type: ignore[arg-type]
    if len(ends) == 3:
        start = min(ends[2].trace)
        # The checkpoint of the step at whose end it joined is that of the workers before it.
        sizes = {step: size_of(tmp_path, step) for step in range(3, 48, 3) if (tmp_path / f"step-{step:08d}").exists()}
        assert {size for step, size in sizes.items() if step <= start} == {2}
        assert {size for step, size in sizes.items() if step > start} <= {3}


def size_of(folder: Path, step: int) -> int:
    """How many workers wrote a checkpoint, all of whose parts are of one save."""
    home = folder / f"step-{step:08d}"
    size = int(checkpoint.facts_of(RankFile(home, 0).outline())["size"])
    checkpoint.read_parts(home, range(size), step, size)
    return size


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=3), PushSum()], ids=str)
def test_a_worker_is_lost_while_others_evaluate_and_one_waits_to_begin(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others evaluate again without it. The one that waits asks to join again."""
    held: list[str] = []
    hold = Elastic._hold

    def first_of_them(self: Elastic, members: tuple[str, ...]) -> None:
        hold(self, members)
        held.append(self.worker_id)
        if self.worker_id == "w1" and held.count("w1") == 1:
            self._connector.end()  # type: ignore[attr-defined]
            raise KilledError

    monkeypatch.setattr(Elastic, "_hold", first_of_them)

    def evaluate(worker: Worker) -> None:
        with worker.consensus():
            pass

    ends = run_fleet(3, strategy, joins=(3,), steps=60, after=evaluate)
    assert isinstance(ends[1].error, KilledError)
    alive = survivors(ends)
    assert [end.steps for end in alive[:2]] == [60, 60]
    assert all(torch.equal(end.agreed, alive[0].agreed) for end in alive)  # type: ignore[arg-type]


def test_load_on_a_worker_that_has_just_joined_keeps_the_state_of_the_run(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []
    steps: list[int] = []

    def resume(worker: Worker) -> None:
        if worker.step == 2 and not (tmp_path / "step-00000002").exists():
            worker.save(tmp_path, extra={"epoch": 7})
        if worker.elastic.has_just_joined:
            steps.append(worker.step)
            found.append(worker.load(tmp_path))
            assert worker.step == steps[-1]
            with pytest.raises(ConfigError, match="has just joined an elastic run"):
                worker.load_state_dict({})

    ends = survivors(run_fleet(1, LocalSGD(period=3), joins=(3,), steps=48, before=resume))
    if len(ends) == 2:
        assert found == [{"epoch": 7}] and steps[0] > 2


def test_a_worker_without_a_state_makes_no_view() -> None:
    """The others may be in the middle of a long round, and would find themselves left out of the run."""
    network = ThreadNetwork()
    store = memory_store()
    member = Membership(store, "new", timeout=0.1, state=network.state)
    member.view = View(1, ("old", "new"), joined=("new",), rows={"old": "", "new": ""})
    with pytest.raises(RunEndedError, match="has no state yet"):
        member.change(Progress(0, True, 0, ready=False))
    assert not store.check(["view/2"])
