# SPDX-License-Identifier: Apache-2.0
"""Workers are lost and join, as threads; those that are left go on as the strategy promises."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.elastic.fleets import End, Kill, run_fleet, survivors
from tests.engine import attach, batch, steps
from tests.grids import fast_where, one_of_each
from thinwire import (
    DQSGD,
    EASGD,
    AllReduce,
    BaseGraph,
    BitBudget,
    Budget,
    CheckpointError,
    ConfigError,
    DiLoCo,
    DoubleAveraging,
    ErrorFeedback,
    ExactDiffusion,
    FetchSGD,
    LocalSGD,
    MismatchError,
    Nearest,
    NoLoCo,
    OneBit,
    OverlapLocalSGD,
    PowerSGD,
    PushSum,
    QuasiGlobal,
    RandomMatching,
    SlowMo,
    Strategy,
    Worker,
)
from thinwire.elastic.handover import hand_over
from thinwire.elastic.rounds import Elastic
from thinwire.methods.codecs.base import draw_key
from thinwire.methods.strategies.gradients.sketches import Table
from thinwire.worker.worker import internals_of

STRATEGIES: list[Strategy] = [
    AllReduce(),
    AllReduce(codec=ErrorFeedback(OneBit(8))),
    LocalSGD(period=3),
    SlowMo(period=3),
    DiLoCo(period=3),
    PushSum(),
    PushSum(staleness=1),
    SlowMo(PushSum(staleness=1), period=3),
    OverlapLocalSGD(period=3),
    Budget(LocalSGD(period=3, codec=ErrorFeedback(Nearest(4, 8))), "60B/step"),
    Budget(AllReduce(PowerSGD()), "100kB/s"),
]


def agree(ends: list[End]) -> None:
    """All agree on one model, whose numbers are finite, and on the views."""
    first = ends[0]
    assert first.agreed is not None and torch.isfinite(first.agreed).all()
    for end in ends:
        assert end.agreed is not None and torch.equal(end.agreed, first.agreed)
        assert end.epochs[-1] == first.epochs[-1]


KILLS = {
    "one": (Kill(1, 4),),
    "rank 0": (Kill(0, 4, 1),),
    "after sending": (Kill(3, 5, 0, after=True),),
    "two": (Kill(0, 3), Kill(2, 7, 1, after=True)),
}


def in_turn(strategies: list[Strategy], others: Sequence[Any]) -> list[Any]:
    """All pairs; each strategy is fast with one of the others in turn, and slow with the rest."""
    return fast_where(
        lambda pair: others.index(pair[1]) == strategies.index(pair[0]) % len(others), product(strategies, others)
    )


@pytest.mark.parametrize(("strategy", "which"), in_turn(STRATEGIES, list(KILLS)), ids=str)
def test_survivors_go_on_with_one_model(strategy: Strategy, which: str) -> None:
    kills = KILLS[which]
    ends = run_fleet(4, strategy, kills=kills)
    alive = survivors(ends)
    assert len(alive) == 4 - len(kills)
    agree(alive)
    members = alive[0].epochs[-1][1]
    assert members == tuple(f"w{i}" for i in range(4) if i not in {kill.rank for kill in kills})
    assert all(end.steps == 12 for end in alive)


@pytest.mark.parametrize("call", range(4))
def test_survivors_of_gradients_repeat_the_step_and_stay_equal(call: int) -> None:
    """Whichever call of a step the lost worker was in, all survivors take the same step once."""
    for after in (False, True):
        ends = survivors(run_fleet(3, AllReduce(), kills=(Kill(1, 4, call, after),)))
        assert ends[0].x is not None and ends[1].x is not None
        assert torch.equal(ends[0].x, ends[1].x)
        assert [end.steps for end in ends] == [12, 12]


@pytest.mark.parametrize("call", range(6))
def test_a_worker_may_be_lost_while_a_failed_backward_pass_is_ended_before_an_evaluation(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, deepest, run = threading.local(), list[int](), Elastic.round

    def watched(self: Elastic, *given: Any, **named: Any) -> Any:
        depth.now = getattr(depth, "now", 0) + 1
        deepest.append(depth.now)
        try:
            return run(self, *given, **named)
        finally:
            depth.now -= 1

    monkeypatch.setattr(Elastic, "round", watched)
    ends = run_fleet(3, thinwire.AllReduce(), steps=6, fails=3, kills=(Kill(rank=2, step=3, call=call),))
    agree(survivors(ends))
    assert max(deepest) == 1, "a round within a round"


def test_a_survivor_alone_trains_as_one_worker() -> None:
    """With AllReduce() the survivor of two takes the steps of one worker, from the step of the loss on."""
    (end,) = survivors(run_fleet(2, AllReduce(), kills=(Kill(1, 0),)))
    (alone,) = run_fleet(1, AllReduce())
    assert end.x is not None and alone.x is not None
    assert torch.allclose(end.x, alone.x)


def plain_descent(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("strategy", "rank"),
    fast_where(
        lambda each: isinstance(each[0], QuasiGlobal) == (each[1] in (None, 1)),
        product([QuasiGlobal(RandomMatching()), DoubleAveraging(BaseGraph())], (None, 0, 1, 2)),
    ),
    ids=str,
)
def test_ranks_without_a_partner_in_some_steps_stay_with_the_others(strategy: Strategy, rank: int | None) -> None:
    """Of three workers one is idle in every step of a matching, and a loss shows to the other one first."""
    kills = () if rank is None else (Kill(rank, 4),)
    ends = survivors(run_fleet(3, strategy, kills=kills, optimizer=plain_descent))
    agree(ends)
    assert [end.steps for end in ends] == [12] * (3 if rank is None else 2)


def test_push_sum_accounts_for_the_weight_that_is_lost() -> None:
    from tests.problems import Irregular

    ends = survivors(run_fleet(4, PushSum(Irregular()), kills=(Kill(2, 5),)))
    lost = {end.told["lost_weight"] for end in ends}
    assert len(lost) == 1, "all tell the same"
    assert 0 < lost.pop() < 4
    agree(ends)


@pytest.mark.parametrize("kills", [(Kill(2, 5),), (Kill(0, 4, after=True), Kill(2, 8))], ids=["one", "two"])
@pytest.mark.parametrize("staleness", [0, 1])
def test_what_survivors_hold_and_what_is_told_as_lost_are_all_the_weight_there_was(
    staleness: int, kills: tuple[Kill, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.problems import Irregular
    from thinwire.methods.strategies.push_sum.mass import weight

    seen: list[tuple[int, int, float, float, float]] = []
    changed = PushSum.change_view

    def watched(self: PushSum, r: thinwire.Replica, before: int) -> Any:
        held = float(weight(r.state["mass"])) if "mass" in r.state else 1.0
        told = changed(self, r, before)
        after = float(weight(r.state["mass"])) if "mass" in r.state else 1.0
        seen.append((r.comm.size, before, held, told["lost_weight"], after))
        return told

    monkeypatch.setattr(PushSum, "change_view", watched)
    survivors(run_fleet(4, PushSum(Irregular(), staleness=staleness), kills=kills))
    for size in {each[0] for each in seen}:
        rows = [each for each in seen if each[0] == size]
        (before,), (lost,) = {row[1] for row in rows}, {row[3] for row in rows}
        assert abs(sum(row[2] for row in rows) + lost - before) <= 1e-12
        assert abs(sum(row[4] for row in rows) - size) <= 1e-12
    assert len(seen) >= 4 - len(kills)


def after_changes(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch, **events: Any
) -> list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
    """The number of workers, the parameters and the state of each after each change of view; then all go on well."""
    seen: list[tuple[int, torch.Tensor, dict[str, torch.Tensor]]] = []
    change = type(strategy).change_view

    def watched(self: Strategy, r: thinwire.Replica, before: int) -> Any:
        told = change(self, r, before)
        seen.append((r.comm.size, r.x.clone(), {name: x.clone() for name, x in r.state.items()}))
        return told

    monkeypatch.setattr(type(strategy), "change_view", watched)
    agree(survivors(run_fleet(3, strategy, optimizer=plain_descent, **events)))
    return seen


CHANGES: list[dict[str, Any]] = [{"kills": (Kill(1, 5),)}, {"joins": (4,), "steps": 24}]


@pytest.mark.parametrize("events", CHANGES, ids=["lost", "joined"])
def test_corrections_of_exact_diffusion_sum_to_zero_among_those_that_are_there(
    events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = after_changes(ExactDiffusion(), monkeypatch, **events)
    size = seen[-1][0]
    corrections = [state["correction"] for number, _, state in seen if number == size][-size:]
    assert size == (2 if "kills" in events else 4) and len(corrections) == size
    assert torch.stack(corrections).sum(0).abs().max() <= 1e-6


@pytest.mark.parametrize("events", CHANGES, ids=["lost", "joined"])
def test_sketches_of_fetch_sgd_are_those_of_what_the_workers_hold(
    events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = FetchSGD(fraction=0.1, columns=5, rows=3, conserving=True)
    seen = after_changes(strategy, monkeypatch, **events)
    size = seen[-1][0]
    states = [state for number, _, state in seen if number == size][-size:]
    for name, sketch in (("momentum", "momentum_sketch"), ("unsent", "error_sketch")):
        held = torch.stack([state[name] for state in states]).sum(0)
        assert held.abs().max() > 0
        table = Table.of(held, states[0][sketch].shape, draw_key(0, 0))
        for state in states:
            torch.testing.assert_close(state[sketch], table.cells)


TRACKING: list[Strategy] = [
    EASGD(period=3, codec=ErrorFeedback(OneBit(8))),
    OverlapLocalSGD(period=3, codec=ErrorFeedback(OneBit(8))),
    DiLoCo(period=3, delay=1, mixing=0.5, codec=ErrorFeedback(OneBit(8))),
]


@pytest.mark.parametrize("events", CHANGES, ids=["lost", "joined"])
@pytest.mark.parametrize("strategy", TRACKING, ids=str)
def test_a_mean_that_tracks_all_workers_begins_anew_among_those_that_are_there(
    strategy: Strategy, events: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = after_changes(strategy, monkeypatch, **events)
    size, x, _ = seen[-1]
    for number, other, state in seen:
        if number != size:
            continue  # of a view that did not come about
        assert torch.equal(other, x), "all begin at one point"
        # Where servers keep the mean, they begin again at the anchor.
        assert torch.equal(state["mean" if "mean" in state else "known_anchor"], x)
        errors = {name: each for name, each in state.items() if name.partition("/")[0] in ("error", "server_error")}
        # What was sent is a vector of its own, or in the residual.
        sent = state["sent"] if "sent" in state else -errors.pop("error")
        assert torch.equal(sent, x)
        assert all(not each.any() for each in errors.values())


CHOOSING: list[Strategy] = [
    Budget(AllReduce(PowerSGD()), "60B/step"),
    Budget(AllReduce(ErrorFeedback(Nearest(4, 8))), "60B/step"),
    Budget(LocalSGD(period=3, codec=ErrorFeedback(Nearest(4, 8))), "60B/step"),
    DQSGD(BitBudget(bits=3.0, steps=12, most=6), block=8),
]


@pytest.mark.parametrize(("strategy", "call"), in_turn(CHOOSING, range(4)), ids=str)
def test_workers_that_choose_what_to_send_choose_alike_after_a_loss(strategy: Strategy, call: int) -> None:
    for after in (False, True):
        alive = survivors(run_fleet(3, strategy, kills=(Kill(1, 5, call, after),), optimizer=plain_descent))
        agree(alive)
        assert len(alive) == 2


def test_who_has_begun_a_pass_that_others_have_not_spends_as_much_as_they_do_after_a_loss() -> None:
    """In the middle of a change of view some have paid for the pass that begins anew, and have earned one step more."""
    strategy = Budget(AllReduce(ErrorFeedback(Nearest(4, 8))), "60B/step")

    def body(comm: thinwire.Comm) -> tuple[float, float]:
        worker = attach(comm, strategy, optimizer=plain_descent)
        steps(worker, [batch(comm.rank, number) for number in range(3)])
        (r,) = worker.replicas
        ahead = 60.0 if comm.rank == 1 else 0.0
        r.state["balance"] += ahead - (50.0 if comm.rank == 1 else 0.0)
        r.state["earned"] += ahead
        before = float(r.state["balance"])
        for _ in range(2):  # another one may be lost in it
            strategy.regroup(r, 3)
        return before, float(r.state["balance"])

    (kept, others), (_, ahead), _ = thinwire.run_threads(3, body)
    assert others == pytest.approx(kept) and ahead == pytest.approx(kept + 60)


def test_who_has_planned_a_pass_by_squares_that_others_have_dropped_plans_as_they_do_after_a_loss() -> None:
    strategy = DQSGD(BitBudget(bits=3.0, steps=12, most=6), block=8)

    def body(comm: thinwire.Comm) -> tuple[list[float], torch.Tensor]:
        worker = attach(comm, strategy, optimizer=plain_descent)
        steps(worker, [batch(comm.rank, number) for number in range(3)])
        (r,) = worker.replicas
        if comm.rank == 1:
            # The beginning of a pass, which the others are about to begin.
            strategy._plan(r)
        strategy.change_view(r, 3)
        steps(worker, [batch(comm.rank, number) for number in range(3, 6)])
        return r.state["ledger"].tolist(), r.x.clone()

    found = thinwire.run_threads(3, body)
    assert all(ledger == found[0][0] and torch.equal(x, found[0][1]) for ledger, x in found)
    assert found[0][0][0] == 5, "the squares of the pass before were used"


@pytest.mark.parametrize("strategy", one_of_each(STRATEGIES), ids=str)
def test_a_worker_joins_with_the_state_of_the_others(strategy: Strategy) -> None:
    ends = survivors(run_fleet(2, strategy, joins=(3,), steps=24))
    agree(ends)
    assert ends[0].epochs[-1][1] == ("w0", "w1", "w2")
    assert 0 < ends[2].steps < 24


def test_a_joiner_gets_the_residual_of_a_worker_and_none_of_a_server() -> None:
    def body(comm: thinwire.Comm) -> tuple[list[str], torch.Tensor]:
        model = torch.nn.Linear(40, 2)
        strategy = AllReduce(codec=ErrorFeedback(OneBit(8)))
        worker = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, comm=comm)
        model(torch.full((1, 40), 1.0 + comm.rank)).sum().backward()
        worker.optimizer.step()
        state = worker.replicas[0].state
        if comm.rank == 2:
            state.clear()
        hand_over(internals_of(worker), [2], 0)
        return [name.partition("/")[0] for name in state], state["error"].clone()

    (there, error), _, (joined, copy) = thinwire.run_threads(3, body)
    assert "server_error" in there and set(joined) == {"error"}
    assert torch.equal(copy, error)


def test_a_joiner_refuses_a_state_that_does_not_fit_before_it_changes_anything() -> None:
    def body(comm: thinwire.Comm) -> bool:
        torch.manual_seed(comm.rank)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        worker = thinwire.attach(model, optimizer, "SlowMo(period=2)", comm=comm)
        if comm.rank == 0:
            hand_over(internals_of(worker), [1], 0)
            return True
        before = model.weight.detach().clone()
        internals_of(worker).seed = 7
        with pytest.raises(CheckpointError, match=r"the seed is 0 .* and 7 in this run"):
            hand_over(internals_of(worker), [1], 0)
        return torch.equal(model.weight, before) and not optimizer.state

    assert thinwire.run_threads(2, body) == [True, True]


def test_a_worker_joins_after_another_was_lost() -> None:
    ends = survivors(run_fleet(3, SlowMo(period=3), kills=(Kill(0, 4),), joins=(9,), steps=24))
    agree(ends)
    assert ends[0].epochs[-1][1] == ("w1", "w2", "w3")


def test_a_joiner_with_another_optimizer_is_refused_and_the_others_go_on() -> None:
    made: list[Any] = []

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        made.append(model)
        return torch.optim.SGD(model.parameters(), lr=0.05 if len(made) <= 2 else 0.1)

    ends = run_fleet(2, LocalSGD(period=2), joins=(3,), steps=24, optimizer=optimizer)
    assert isinstance(ends[2].error, MismatchError) and "lr of optimizer group 0" in str(ends[2].error)
    agree(survivors(ends[:2]))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (thinwire.ADPSGD(), "own pace"),
        (thinwire.BackupWorkers(), "continues by itself without up to `backups` lost workers"),
        (thinwire.Sharded(SlowMo()), "part of the outer state"),
        (thinwire.NodeAverage(), "neighboring ranks"),
        (
            LocalSGD(codec=thinwire.BetweenNodes(ErrorFeedback(OneBit()))),
            r"with BetweenNodes: its nodes are neighboring ranks.*\. Use the codec inside it",
        ),
        (SlowMo(codec=thinwire.BetweenNodes()), "with BetweenNodes"),
    ],
    ids=str,
)
def test_what_cannot_survive_is_refused_at_attach(strategy: Strategy, words: str) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=words):
        thinwire.attach(model, optimizer, strategy, elastic=True)


def test_a_store_that_dies_with_rank_0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("THINWIRE_STORE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="thinwire store"):
        thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), elastic=True)


def test_push_sum_goes_on_when_one_that_was_left_alone_is_joined() -> None:
    ends = run_fleet(2, PushSum(staleness=1), steps=16, kills=(Kill(0, 3),), joins=(6,))
    alive = survivors(ends)
    assert [len(members) for _, members in alive[0].epochs] == [2, 1, 2]
    agree(alive)


@pytest.mark.parametrize(("kill", "steps"), [(Kill(1, 8), 4), (Kill(1, 8, after=True), 8), (Kill(1, 4), 0)])
def test_steps_after_the_last_meeting_of_a_lost_neighbor_are_used_by_nobody(kill: Kill, steps: int) -> None:
    alive = survivors(run_fleet(2, NoLoCo(period=4), steps=14, epoch=7, kills=(kill,)))
    assert [each.crews[1].unused_from for each in alive] == [steps]


@pytest.mark.parametrize(
    ("strategy", "joins", "lost", "steps"),
    [
        pytest.param(DiLoCo(period=8, delay=3), 1, 4, 0, id="before the first mean"),
        # All take the mean of their parameters in place of the one in flight.
        pytest.param(
            DiLoCo(period=8, delay=3, codec=ErrorFeedback(Nearest(4, 8))), 6, 9, 7, id="while it is in flight"
        ),
        pytest.param(DiLoCo(period=8, delay=3), 7, 9, 5, id="when it has arrived"),
    ],
)
def test_a_worker_that_joins_knows_which_steps_of_a_lost_worker_its_state_contains(
    strategy: Strategy, joins: int, lost: int, steps: int
) -> None:
    """The first mean starts at step 5 and is used at step 8. A worker is lost at the next start of a mean."""

    def evaluate(worker: Worker) -> None:
        if worker.step == 2:
            with worker.consensus():  # in which all hear of a request to join
                pass

    entered = threading.Event()

    def wait(worker: Worker) -> None:
        if worker.elastic.worker_id == "w3":
            entered.set()
        elif worker.step == lost:
            assert entered.wait(20)

    kills = (Kill(1, lost),)
    ends = run_fleet(3, strategy, steps=18, epoch=100, kills=kills, joins=(joins,), before=wait, after=evaluate)
    alive = survivors(ends)
    assert len(alive) == 3 and alive[0].epochs[1][1] == ("w0", "w1", "w2", "w3")
    assert [each.crews[-1].unused_from for each in alive] == [steps] * 3
    unused = {batch for step, batch in ends[1].batches if step >= steps}
    assert unused <= {batch for each in alive for _, batch in each.batches} | {*alive[0].lost.get(0, [])}


@pytest.mark.parametrize(
    ("strategy", "saved", "steps"),
    [(LocalSGD(period=4), 6, 4), (LocalSGD(period=4), 2, 0), (DiLoCo(period=8, delay=3), 19, 8), (AllReduce(), 6, 6)],
    ids=str,
)
def test_a_loaded_state_contains_the_steps_of_its_last_average(
    strategy: Strategy, saved: int, steps: int, tmp_path: Path
) -> None:
    def save(worker: Worker) -> None:
        if worker.step == saved:
            worker.save(tmp_path)

    run_fleet(2, strategy, steps=saved, after=save)

    def resume(worker: Worker) -> None:
        if worker.step == 0:
            worker.load(tmp_path)

    ends = run_fleet(2, strategy, steps=saved + 6, epoch=50, before=resume, kills=(Kill(1, saved + 1),))
    assert [each.crews[1].unused_from for each in survivors(ends)] == [steps + (strategy == AllReduce())]


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(period=3)], ids=str)
@pytest.mark.parametrize(
    ("kills", "joins"),
    [((), ()), ((Kill(1, 4),), ()), ((Kill(0, 3, 1),), ()), ((), (4,)), ((Kill(2, 7),), (2,))],
    ids=["nobody", "one", "rank 0", "one joins", "one joins and one is lost"],
)
def test_an_epoch_is_dealt_to_whoever_is_there(
    strategy: Strategy, kills: tuple[Kill, ...], joins: tuple[int, ...]
) -> None:
    epoch, steps = 60, 12
    ends = run_fleet(3, strategy, steps=steps, kills=kills, joins=joins, epoch=epoch)
    alive = survivors(ends)
    used = [number for end in alive for _, number in end.batches]
    # The survivors of a step that was repeated had its batches already, so that none is used twice by them.
    assert len(used) == len(set(used))
    # The steps of a lost worker up to the last average are in the model. All later ones are assigned again, or listed.
    period = getattr(strategy, "period", 1)
    listed = {number for numbers in alive[0].lost.values() for number in numbers}
    in_model: set[int] = set()
    for end in ends:
        if end.error is not None:
            averaged = end.steps // period * period
            in_model |= {number for step, number in end.batches if step < averaged}
            assert {number for step, number in end.batches if step >= averaged} <= listed | set(used)
    assert not in_model & set(used)
    found = in_model | set(used) | listed
    assert sorted(found) == sorted(dealt_in(epoch, len(found)))


def dealt_in(epoch: int, count: int) -> list[int]:
    """The first batches of the first epoch, in the order in which they are dealt."""
    return torch.randperm(epoch, generator=torch.Generator().manual_seed(0)).tolist()[:count]
