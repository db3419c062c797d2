# SPDX-License-Identifier: Apache-2.0
"""The faults of hivemind's `test_allreduce_fault_tolerance`, over a round of Local SGD and DiLoCo on threads.

A worker fails before it sends, while it sends, or after; is cancelled; or is slow. Every element must then be the mean
over all workers, or that over the survivors; and, which hivemind does not ask, one of the two for the whole vector, the
same on all survivors.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import pytest
import torch

from tests.elastic import fleets
from tests.elastic.fleets import End, Kill, KilledError, run_fleet, survivors
from tests.grids import fast_where
from thinwire import (
    AllReduce,
    CoCoD,
    DiLoCo,
    LocalSGD,
    OuterOptimizer,
    OverlapLocalSGD,
    PeerLostError,
    PushSum,
    SlowMo,
    Strategy,
)
from thinwire.elastic.rounds import Elastic
from thinwire.worker.buckets import Backward

SIZE, VICTIM, PERIOD = 4, 1, 2
# A check that all are in step is the first message of a round, the average the second. This outer step is the average.
STRATEGIES: list[Strategy] = [
    LocalSGD(period=PERIOD),
    DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=1.0, momentum=0.0, nesterov=False)),
]

IN_FLIGHT: list[Strategy] = [
    AllReduce(),
    CoCoD(period=3),
    OverlapLocalSGD(period=3),
    DiLoCo(period=4, fragments=2, delay=1),
    SlowMo(PushSum(staleness=1), period=3),
]


def one_round(strategy: Strategy, *kills: Kill, timeout: float = 10.0) -> list[End]:
    return run_fleet(SIZE, strategy, steps=PERIOD, kills=kills, timeout=timeout)


def check_means(ends: list[End], undisturbed: list[End]) -> bool:
    """Whether the mean is that of all workers; else it must be that of the survivors."""
    alive = survivors(ends)
    # What each would send, from a run of nobody but itself: their first round begins at the same parameters.
    own = [end.trace[PERIOD - 1] for end in ends]
    assert all(torch.equal(end.trace[PERIOD], alive[0].trace[PERIOD]) for end in alive)
    result = alive[0].trace[PERIOD]
    assert [torch.equal(a, b.trace[PERIOD - 1]) for a, b in zip(own, undisturbed, strict=True)] == [True] * SIZE
    return torch.allclose(result, undisturbed[0].trace[PERIOD], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize(("call", "after"), [(0, False), (1, False), (1, True)], ids=["before", "while", "after"])
def test_a_worker_that_fails_before_while_or_after_sending_leaves_one_mean(
    strategy: Strategy, call: int, after: bool
) -> None:
    whole = one_round(strategy)
    ends = one_round(strategy, Kill(VICTIM, PERIOD, call, after))
    assert len(survivors(ends)) == SIZE - 1
    of_all = check_means(ends, whole)
    if not after:
        assert not of_all, "it has sent nothing of the average"
    assert all(end.epochs[-1][0] == 1 for end in survivors(ends))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["LocalSGD", "DiLoCo"])
def test_a_worker_that_is_cancelled_leaves_one_mean(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancel(_: Any) -> None:
        raise KilledError  # its connections close when its loop is left, as with an exception of the user's

    monkeypatch.setattr(fleets._Trap, "strike", cancel)
    ends = one_round(strategy, Kill(VICTIM, PERIOD, 1))
    assert len(survivors(ends)) == SIZE - 1
    assert not check_means(ends, one_round(strategy))


def delayed(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The victim's message is late, once."""
    struck: list[bool] = []

    def wait(_: Any) -> None:
        if not struck:
            struck.append(True)
            time.sleep(seconds)

    monkeypatch.setattr(fleets._Trap, "strike", wait)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["LocalSGD", "DiLoCo"])
@pytest.mark.parametrize(("seconds", "views"), [(0.3, 1), (1.3, 2)], ids=["within the timeout", "beyond the timeout"])
def test_a_worker_that_is_slow_is_waited_for_or_taken_in_again(
    strategy: Strategy, seconds: float, views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed(seconds, monkeypatch)
    ends = one_round(strategy, Kill(VICTIM, PERIOD, 1), timeout=0.9)
    assert len(survivors(ends)) == SIZE
    assert check_means(ends, one_round(strategy)), "late, but in it"
    assert all(len(end.epochs) == views for end in ends)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["LocalSGD", "DiLoCo"])
def test_a_round_that_fails_without_a_loss_is_put_back_and_taken_again_by_all(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchft's failure of a commit: nobody keeps the outer step, and the next attempt gives the same."""
    struck: list[bool] = []

    def reset(_: Any) -> None:
        if not struck:
            struck.append(True)
            raise PeerLostError("a connection was reset")

    monkeypatch.setattr(fleets._Trap, "strike", reset)
    for kill in (Kill(VICTIM, PERIOD, 1), Kill(VICTIM, PERIOD, 1, after=True)):
        struck.clear()
        ends = run_fleet(SIZE, strategy, steps=3 * PERIOD, kills=(kill,))
        assert [len(end.epochs[-1][1]) for end in survivors(ends)] == [SIZE] * SIZE
        whole = run_fleet(SIZE, strategy, steps=3 * PERIOD)
        assert all(torch.equal(a.trace[at], b.trace[at]) for a, b in zip(ends, whole, strict=True) for at in a.trace)


@pytest.mark.parametrize(
    "strategy",
    [DiLoCo(period=4), DiLoCo(period=4, fragments=2), DiLoCo(period=4, fragments=2, delay=1, mixing=0.5)],
    ids=["one fragment", "two fragments", "two that overlap"],
)
def test_a_run_that_is_scaled_up_twice_ends_with_one_model(strategy: Strategy) -> None:
    """torchft's upscale of (streaming) DiLoCo: replicas that start later recover from a living one."""
    ends = survivors(run_fleet(2, strategy, joins=(4, 12), steps=48))
    assert len(ends) == 4 and len(ends[0].epochs[-1][1]) == 4
    agreed = [end.agreed for end in ends]
    assert all(x is not None and torch.equal(x, agreed[0]) for x in agreed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("strategy", "at"),
    fast_where(lambda each: (IN_FLIGHT.index(each[0]) + each[1]) % 3 == 0, product(IN_FLIGHT, range(4, 10))),
    ids=str,
)
def test_workers_that_are_a_step_apart_go_on_together(
    strategy: Strategy, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection breaks when one worker has all answers at the end of a round, and the other has not."""
    confirm, broken = Elastic.confirm, list[int]()

    def breaks(self: Elastic) -> None:
        confirm(self)
        if self.worker_id == "w1" and self.worker.step == at and not broken:
            broken.append(at)
            raise PeerLostError("an answer has got lost")

    monkeypatch.setattr(Elastic, "confirm", breaks)
    ends = survivors(run_fleet(3, strategy, timeout=5.0))
    assert [end.steps for end in ends] == [12, 12, 12]
    for end in ends:
        assert end.agreed is not None and torch.equal(end.agreed, ends[0].agreed)  # type: ignore[arg-type]
        assert end.epochs[-1] == (len(broken), ("w0", "w1", "w2"))


@pytest.mark.parametrize("rank", range(3))
def test_a_step_whose_mean_only_some_workers_have_is_taken_again_by_all(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have the mean and wait for the word of one that has not must send their gradients again."""
    collect, calls, at = Backward._collect, list[int](), list[int]()

    def fails(self: Backward, state: int) -> None:
        collect(self, state)
        if self.comm.rank == rank and not at:
            calls.append(state)
            if len(calls) == 5:
                at.append(state)
                raise PeerLostError("the mean has got lost")

    monkeypatch.setattr(Backward, "_collect", fails)
    ends = survivors(run_fleet(3, AllReduce(), timeout=5.0))
    assert at and all(end.epochs[-1] == (1, ("w0", "w1", "w2")) for end in ends)
    whole = run_fleet(3, AllReduce())
    assert all(torch.equal(a.trace[step], b.trace[step]) for a, b in zip(ends, whole, strict=True) for step in a.trace)
