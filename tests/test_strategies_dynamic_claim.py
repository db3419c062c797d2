"""Verdicts on bits and sketches follow from the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from laconic.runs.claims import dqsgd, sketched_sgd
from laconic.runs.studies.quantized_regression import Kept, kept, parity
from laconic.runs.studies.quantized_threads import Learned, learned
from laconic.runs.studies.threads import Schedule
from laconic.strategies.all_reduce import AllReduce
from laconic.tasks import load

GOOD = Kept(gap=1e-6, bound=1e-5, added=0.9, bits=(3,) * 100, fewest=299, squares=(1.0,) * 100)
RUN = Learned(accuracy=0.9, loss=0.3, payload_bytes=750.0, steps=10, parameters=100)


def methods(**changes: float) -> dict[str, list[Learned]]:
    runs = {name: [replace(RUN, payload_bytes=1000.0)] for name in dqsgd.methods(10)}
    return runs | {"DQ-SGD, 3 bits": [replace(RUN, **changes)]}


def test_a_kept_bound_with_few_bits_and_as_much_learned_with_fewer_bytes_holds() -> None:
    found = dqsgd.judge([GOOD, GOOD], {"digits": methods()}, [])
    assert found.holds
    assert found.value == pytest.approx(300 / 299 - 1)
    assert "0.75 times its bytes" in found.measured


@pytest.mark.parametrize(
    ("bounds", "runs"),
    [
        ([replace(GOOD, gap=2e-5)], methods()),
        ([replace(GOOD, added=1.01)], methods()),
        ([replace(GOOD, fewest=290)], methods()),
        ([GOOD], methods(accuracy=0.89)),
        ([GOOD], methods(payload_bytes=900.0)),
    ],
)
def test_a_broken_bound_many_bits_or_less_learned_does_not_hold(
    bounds: list[Kept], runs: dict[str, list[Learned]]
) -> None:
    assert not dqsgd.judge(bounds, {"digits": runs}, []).holds


def sketches(**changes: float) -> sketched_sgd.Found:
    plan = sketched_sgd.scales(quick=True, real=False)[0]
    runs = {
        (n, name): [replace(RUN, payload_bytes=5000.0)] for n in plan.workers for name in sketched_sgd.methods(plan)
    }
    return (
        runs
        | {(plan.workers[-1], sketched_sgd.SKETCHED): [replace(RUN, **changes)]}
        | {(plan.workers[0], sketched_sgd.SKETCHED): [RUN]}
    )


@pytest.mark.parametrize(
    ("changes", "crowd", "holds"),
    [
        ({}, 750.0, True),
        ({"accuracy": 0.88}, 750.0, False),
        ({"payload_bytes": 2000.0}, 2000.0, False),
        ({}, 900.0, False),
    ],
)
def test_sketches_hold_where_nothing_is_lost_for_a_fraction_that_stays_so(
    changes: dict[str, float], crowd: float, holds: bool
) -> None:
    plans = sketched_sgd.scales(quick=True, real=False)
    crowds = {"digits": {sketched_sgd.SKETCHED: replace(RUN, payload_bytes=crowd)}}
    assert sketched_sgd.judge(plans, {"digits": sketches(**changes)}, crowds, []).holds == holds


@pytest.mark.parametrize(("nbytes", "holds"), [(240.0, True), (260.0, False)])
def test_on_mnist_twenty_times_less_is_asked(nbytes: float, holds: bool) -> None:
    (plan,) = sketched_sgd.scales(quick=True, real=True)
    runs = {(n, sketched_sgd.DENSE): [replace(RUN, payload_bytes=5000.0)] for n in plan.workers}
    runs |= {(n, sketched_sgd.SKETCHED): [replace(RUN, payload_bytes=nbytes)] for n in plan.workers}
    crowds = {"mnist": {sketched_sgd.SKETCHED: replace(RUN, payload_bytes=nbytes)}}
    assert sketched_sgd.judge([plan], {"mnist": runs}, crowds, []).holds == holds


def test_bits_are_tried_on_the_paper_s_tasks_where_their_files_are() -> None:
    assert [plan.task for plan in dqsgd.scales(quick=True, real=True)] == ["agnews"]
    assert [plan.task for plan in dqsgd.scales(quick=False, real=True)] == ["agnews", "cifar10"]
    assert [plan.task for plan in dqsgd.scales(quick=True, real=False)] == ["digits"]


def test_accounts_of_threads_count_every_byte() -> None:
    found = learned(load("digits"), AllReduce(), Schedule(3, 4, 0.1), workers=2, seed=0)
    assert found.payload_bytes == 3 * 4 * found.parameters
    assert found.bits_per_entry == 32
    assert 0 <= found.accuracy <= 1


def test_a_short_convex_run_stays_within_its_bound() -> None:
    problem = parity(load("digits"), 2)
    found = kept(problem, error=1e-3, steps=20, lr=0.5 / problem.smoothness, seed=0)
    assert 0 <= found.gap <= found.bound
    assert 0 < found.added <= 1
    assert len(found.bits) == len(found.squares) == 20
    assert found.bits[0] == 8
