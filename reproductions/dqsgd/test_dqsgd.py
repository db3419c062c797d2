# SPDX-License-Identifier: Apache-2.0
"""Verdicts on bits and sketches follow from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reproductions.dqsgd import claim as dqsgd
from reproductions.dqsgd.regression import Kept, kept, parity
from reproductions.dqsgd.thread_runs import Learned, learned
from reproductions.shared.claims import Attempt
from reproductions.shared.threads import Schedule
from reproductions.sketched_sgd import claim as sketched_sgd
from reproductions.sketched_sgd.processes import learned_by_processes
from thinwire import AllReduce, SketchedSGD
from thinwire.lab.runs.launcher import ignore_event
from thinwire.lab.tasks import load

GOOD = Kept(gap=1e-6, bound=1e-5, added=0.9, bits=(3,) * 100, fewest=299, squares=(1.0,) * 100)
RUN = Learned(accuracy=0.9, loss=0.3, payload_bytes=750.0, steps=10, parameters=100)


def methods(*accuracies: float, payload_bytes: float = 750.0) -> dict[str, list[Learned]]:
    """Three seeds of every method, alike but for the accuracies and bytes of ours."""
    ours = [replace(RUN, accuracy=each, payload_bytes=payload_bytes) for each in accuracies or (0.9, 0.9, 0.9)]
    runs = {name: [replace(RUN, payload_bytes=1000.0)] * len(ours) for name in dqsgd.methods(10)}
    return runs | {"DQ-SGD, 2.95 bits": ours}


def test_a_kept_bound_with_few_bits_and_as_much_learned_with_fewer_bytes_holds() -> None:
    found = dqsgd.judge([GOOD, GOOD], {"digits": methods()})
    assert found.holds
    assert found.value == pytest.approx(300 / 299 - 1)
    assert "0.7500 times its bytes" in found.measured
    assert "+0.00 ± 0.00 points" in found.details["digits, DQ-SGD, 2.95 bits beside TernGrad"]


@pytest.mark.parametrize(
    ("bounds", "runs"),
    [
        ([replace(GOOD, gap=2e-5)], methods()),
        ([replace(GOOD, added=1.01)], methods()),
        ([replace(GOOD, fewest=290)], methods()),
        ([GOOD], methods(0.89, 0.89, 0.89)),
        ([GOOD], methods(payload_bytes=751.0)),
    ],
)
def test_a_broken_bound_many_bits_or_less_learned_does_not_hold(
    bounds: list[Kept], runs: dict[str, list[Learned]]
) -> None:
    assert not dqsgd.judge(bounds, {"digits": runs}).holds


@pytest.mark.parametrize(
    ("accuracies", "payload_bytes", "outcome"),
    [
        ((0.896, 0.9, 0.91), 750.0, "holds"),
        ((0.89, 0.9, 0.95), 750.0, "within noise"),
        ((0.91, 0.92, 0.93), 760.0, "holds"),
        ((0.89, 0.92, 0.93), 760.0, "within noise"),
        ((0.9, 0.901, 0.902), 760.0, "does not hold"),
    ],
)
def test_accuracy_is_judged_seed_by_seed(accuracies: tuple[float, ...], payload_bytes: float, outcome: str) -> None:
    runs = methods(*accuracies, payload_bytes=payload_bytes)
    assert dqsgd.judge([GOOD], {"digits": runs}).parts["accuracy"] == outcome
    # One task that fails is not outweighed by another.
    both = {"digits": runs, "cifar10": methods(0.8, 0.8, 0.8)}
    assert dqsgd.judge([GOOD], both).parts["accuracy"] == "does not hold"


def test_bits_are_judged_seed_by_seed() -> None:
    assert dqsgd.judge([GOOD, replace(GOOD, fewest=290)], {"digits": methods()}).parts["fewest bits"] == (
        "within noise"
    )


def test_every_judged_task_has_three_seeds() -> None:
    forms = [(quick, real) for quick in (True, False) for real in (True, False)]
    assert all(plan.seeds >= 3 for form in forms for plan in dqsgd.scales(*form))
    for real in (True, False):
        (plan,) = sketched_sgd.scales(quick=False, real=real)
        assert plan.seeds == plan.many_seeds == 3


def sketches(accuracies: Sequence[float] = (0.9,), **changes: float) -> sketched_sgd.Found:
    plan = sketched_sgd.scales(quick=True, real=False)[0]
    runs = {
        (n, name): [replace(RUN, payload_bytes=5000.0)] * len(accuracies)
        for n in plan.workers
        for name in sketched_sgd.methods(plan)
    }
    return (
        runs
        | {(plan.workers[-1], sketched_sgd.SKETCHED): [replace(RUN, accuracy=a, **changes) for a in accuracies]}
        | {(plan.workers[0], sketched_sgd.SKETCHED): [RUN] * len(accuracies)}
    )


@pytest.mark.parametrize(
    ("changes", "crowd", "holds"),
    [
        ({}, 750.0, True),
        ({"accuracies": (0.88,)}, 750.0, False),
        ({"payload_bytes": 2000.0}, 2000.0, False),
        ({}, 900.0, False),
    ],
)
def test_sketches_hold_where_nothing_is_lost_for_a_fraction_that_stays_so(
    changes: dict[str, Any], crowd: float, holds: bool
) -> None:
    plans = sketched_sgd.scales(quick=True, real=False)
    crowds = {"digits": {sketched_sgd.SKETCHED: replace(RUN, payload_bytes=crowd)}}
    assert sketched_sgd.judge(plans, {"digits": sketches(**changes)}, crowds).holds == holds


@pytest.mark.parametrize(
    ("accuracies", "outcome"),
    [((0.9, 0.893, 0.91), "holds"), ((0.9, 0.889, 0.91), "within noise"), ((0.88, 0.87, 0.889), "does not hold")],
)
def test_accuracy_of_sketches_is_judged_seed_by_seed(accuracies: tuple[float, ...], outcome: str) -> None:
    plans = sketched_sgd.scales(quick=True, real=False)
    crowds = {"digits": {sketched_sgd.SKETCHED: RUN}}
    found = sketched_sgd.judge(plans, {"digits": sketches(accuracies)}, crowds)
    assert found.parts["accuracy"] == outcome
    assert f"{100 * (accuracies[0] - 0.9):+.2f}" in found.details["digits, 16 workers, Sketched SGD less dense SGD"]


@pytest.mark.parametrize(("nbytes", "holds"), [(240.0, True), (260.0, False)])
def test_on_mnist_twenty_times_less_is_asked(nbytes: float, holds: bool) -> None:
    (plan,) = sketched_sgd.scales(quick=True, real=True)
    runs = {(n, sketched_sgd.DENSE): [replace(RUN, payload_bytes=5000.0)] for n in plan.workers}
    runs |= {(n, sketched_sgd.SKETCHED): [replace(RUN, payload_bytes=nbytes)] for n in plan.workers}
    crowds = {"mnist": {sketched_sgd.SKETCHED: replace(RUN, payload_bytes=nbytes)}}
    assert sketched_sgd.judge([plan], {"mnist": runs}, crowds).holds == holds


@pytest.mark.parametrize(
    ("wire", "words"), [((9000.0, 900.0), "10.00 times less on the wire between 4 processes"), (None, "not counted")]
)
def test_bytes_on_the_wire_are_told_where_interfaces_count_them(wire: tuple[float, float] | None, words: str) -> None:
    plans, runs = sketched_sgd.scales(quick=True, real=False), dict(sketches())
    for name, nbytes in zip((sketched_sgd.DENSE, sketched_sgd.SKETCHED), wire or (None, None), strict=True):
        runs[4, name] = [replace(run, wire_bytes=nbytes) for run in runs[4, name]]
    plans = [replace(plan, crowd=16) for plan in plans]
    found = sketched_sgd.judge(plans, {"digits": runs}, {"digits": {sketched_sgd.SKETCHED: RUN}})
    assert words in found.measured
    assert "accuracy" in found.details["digits, 16 workers, Sketched SGD"]
    assert "accuracy" not in found.details["digits, bytes on 16 workers, Sketched SGD"]
    assert ("900 on the wire" in found.details["digits, 4 workers, dense SGD"]) == (wire is not None)


def test_where_time_is_short_what_no_verdict_needs_is_left_out() -> None:
    for real in (False, True):
        (quick,), whole = (sketched_sgd.scales(quick=each, real=real) for each in (True, False))
        assert list(sketched_sgd.on_many(quick)) == [sketched_sgd.DENSE, sketched_sgd.SKETCHED]
        assert not sketched_sgd.variants(quick)
        assert all(sketched_sgd.TOP_K in sketched_sgd.on_many(plan) for plan in whole)
        assert all(sketched_sgd.TOP_K in sketched_sgd.learned_by(plan, 64) for plan in whole)
        assert not any(sketched_sgd.TOP_K in sketched_sgd.learned_by(plan, 256) for plan in whole)
        assert all(len(sketched_sgd.variants(plan)) == 3 for plan in whole)
        (quick_bits,), whole_bits = (dqsgd.scales(quick=each, real=real) for each in (True, False))
        assert {"SGD", "SignSGD", "TernGrad", "QSGD, 4 bits", "DQ-SGD, 2.95 bits"} <= set(
            dqsgd.methods(10, quick_bits.left_out)
        )
        assert len(dqsgd.methods(10, whole_bits[0].left_out)) == 9


def test_bits_are_tried_on_the_paper_s_tasks_where_their_files_are() -> None:
    assert [plan.task for plan in dqsgd.scales(quick=True, real=True)] == ["agnews"]
    assert [plan.task for plan in dqsgd.scales(quick=False, real=True)] == ["agnews", "cifar10"]
    assert [plan.task for plan in dqsgd.scales(quick=True, real=False)] == ["digits"]


def test_accounts_of_threads_count_every_byte() -> None:
    found = learned(load("digits"), AllReduce(), Schedule(3, 4, 0.1), workers=2, seed=0)
    assert found.payload_bytes == 3 * 4 * found.parameters
    assert found.bits_per_entry == 32
    assert 0 <= found.accuracy <= 1


def test_processes_learn_what_threads_do_and_count_the_same_bytes(tmp_path: Path) -> None:
    task, schedule, begun = load("digits"), Schedule(20, 8, 0.2), list[str]()
    strategy = SketchedSGD(0.02, columns=4, rows=1, momentum=0.0, dense_below=128, recovery="sketch")
    attempt = Attempt(tmp_path, True, ignore_event, lambda recipe, _: begun.append(recipe))
    (found,) = learned_by_processes(attempt, "runs", task, strategy, schedule, workers=2, seeds=1)
    same = learned(task, strategy, schedule, workers=2, seed=0)
    assert begun == [str(strategy)]
    assert (found.payload_bytes, found.steps, found.parameters) == (same.payload_bytes, 20, same.parameters)
    assert found.loss == pytest.approx(same.loss, rel=1e-4)
    assert found.wire_bytes is None or found.wire_bytes > found.payload_bytes


def test_a_short_convex_run_stays_within_its_bound() -> None:
    problem = parity(load("digits"), 2)
    found = kept(problem, error=1e-3, steps=20, lr=0.5 / problem.smoothness, seed=0)
    assert 0 <= found.gap <= found.bound
    assert 0 < found.added <= 1
    assert len(found.bits) == len(found.squares) == 20
    assert found.bits[0] == 8
