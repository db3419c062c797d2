# SPDX-License-Identifier: Apache-2.0
"""What a loop, a machine or an operator does to a run: it goes on rightly, or all ranks say who did what.

`python -m tests.faults.many` runs as many seeds as wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.battery.cases import STRATEGIES
from tests.faults.drawn import PLACES, Fault, Kind, fault
from tests.faults.many import results
from tests.faults.rank import Ending
from tests.faults.runs import wrong
from thinwire import LocalSGD, Probe, SketchedSGD

SEEDS = range(500)
QUICK = 1
"""Seeds of each kind that are always tried on threads."""


def endings_that_are_wrong(faults: Sequence[Fault]) -> list[str]:
    return [f"{each}\n    {problem}" for each, _, problem in results(faults, together=4) if problem]


def kinds() -> pytest.MarkDecorator:
    """Every kind of fault."""
    return pytest.mark.parametrize("kind", PLACES)


@kinds()
def test_a_fault_on_threads_ends_every_rank_by_name_or_none(kind: Kind) -> None:
    faults = [each for each in map(fault, SEEDS) if each.kind == kind and not each.processes]
    assert not (bad := endings_that_are_wrong(faults[:QUICK])), "\n".join(bad)


def test_a_rank_that_is_killed_while_the_others_train_is_named_by_them_all() -> None:
    faults = [each for each in map(fault, SEEDS) if each.kind == "kill" and each.processes and each.phase == "backward"]
    assert not (bad := endings_that_are_wrong(faults[:1])), "\n".join(bad)


def test_a_second_stage_in_flight_does_not_meet_another_rank_s_consensus() -> None:
    each = next(
        each for each in STRATEGIES if isinstance(each.strategy, SketchedSGD) and each.strategy.second_round > 0
    )
    bad = endings_that_are_wrong([Fault(0, each, 3, True, "left out", "forward", 6, 2, (1,))])
    assert not bad, "\n".join(bad)


@pytest.mark.slow
def test_the_sums_of_a_measurement_do_not_meet_another_rank_s_gradient() -> None:
    each = next(each for each in STRATEGIES if each.strategy == Probe(every=2))
    faults = [Fault(0, each, 3, True, "repeated batch", "before step", 4, call, (1,)) for call in range(3)]
    assert not (bad := endings_that_are_wrong(faults)), "\n".join(bad)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@kinds()
def test_no_fault_of_many_is_a_hang_a_wrong_name_or_a_wrong_model(kind: Kind) -> None:
    faults = [each for each in map(fault, SEEDS) if each.kind == kind]
    assert not (bad := endings_that_are_wrong(faults)), "\n".join(bad)


# -- the draw and the verdict ------------------------------------------------------------------------------------------


def test_the_seeds_have_every_strategy_kind_phase_and_wire() -> None:
    faults = [fault(seed) for seed in SEEDS]
    assert {str(each.case) for each in faults} == {str(each) for each in STRATEGIES}
    assert {(each.kind, each.phase) for each in faults} == {(kind, phase) for kind in PLACES for phase in PLACES[kind]}
    assert {(each.kind, each.processes) for each in faults} == {
        (kind, wire) for kind in PLACES for wire in (False, True)
    }
    assert sum(each.processes for each in faults) >= 100


def of_kind(kind: Kind) -> Fault:
    each = next(each for each in STRATEGIES if each.strategy == LocalSGD(3))
    return Fault(0, each, 3, False, kind, "backward", 4, 0, (1,))


@pytest.mark.parametrize(
    ("kind", "others", "victim", "words"),
    [
        ("kill", Ending("PeerLostError", "rank 0, step 5, all_reduce: rank 1 is lost (x)"), Ending("gone"), ""),
        ("kill", Ending("hangs"), Ending("gone"), "hang"),
        ("kill", Ending("done"), Ending("gone"), "are done without"),
        ("kill", Ending("RuntimeError", "x"), Ending("gone"), "of another kind"),
        ("kill", Ending("PeerLostError", "rank 0, step 5, all_reduce: rank 2 is lost (x)"), Ending("gone"), "blames"),
        ("stop", Ending("CommTimeoutError", "rank 0, step 5, all_reduce: no answer"), Ending("gone"), "does not name"),
        (
            "stop",
            Ending("PeerLostError", "rank 2 was lost at step 5 (CommTimeoutError: rank 2 waited 4 s for rank 1)"),
            Ending("gone"),
            "",
        ),
        ("left out", Ending("done"), Ending("MismatchError", "rank 1 is at step 4"), "are done, and"),
        (
            "left out",
            Ending("MismatchError", "ranks 0, 2 are in consensus() at step 5, rank 1 is in consensus() at step 4"),
            Ending("MismatchError", "ranks 0, 2 are in consensus() at step 5, rank 1 is in consensus() at step 4"),
            "",
        ),
        ("nan", Ending("NonFiniteError", "rank 1, step 3: parameter w1"), Ending("NonFiniteError", "rank 1"), ""),
    ],
)
def test_the_verdict_sees_what_is_wrong(kind: Kind, others: Ending, victim: Ending, words: str) -> None:
    found = wrong(of_kind(kind), [others, victim, others])
    assert words in found
    assert bool(words) == bool(found)


def test_the_verdict_sees_models_that_are_not_those_of_workers_who_train_together() -> None:
    each = of_kind("repeated batch")
    good = Ending("done", step=11, model=(1.0,) * 34, agreed=(1.0,) * 34, sent=1e6)
    apart = Ending("done", step=11, model=(9.0,) * 34, agreed=(1.0,) * 34, sent=1e6)
    assert wrong(each, [good, good, good]) == ""
    assert "as far apart" in wrong(each, [good, good, apart])
    for changes, words in (
        ({"step": 10}, "different numbers of steps"),
        ({"agreed": (2.0,) * 34}, "do not agree"),
        ({"model": (float("nan"),) * 34}, "not finite"),
        ({"sent": 1.0}, "bytes"),
    ):
        assert words in wrong(each, [good, good, Ending(**{**vars(good), **changes})])
