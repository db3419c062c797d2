# SPDX-License-Identifier: Apache-2.0
"""EASGD and EAMSGD: they equal their papers, and what holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.methods.strategies.leader_runs import DoubleWell, starts_of
from tests.oracles.common import Descent
from tests.oracles.machines import Elastic, path
from tests.problems import Regression, average_outside, begin, distance, flat, go_on, together, train
from tests.rules import refusals
from thinwire import Comm, ConfigError, run_threads
from thinwire.methods.strategies.local.elastic_averaging import EASGD

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
FORMS: list[dict[str, Any]] = [
    {"period": 1, "pull": 0.2, "centre_pull": 0.6},
    {"period": 5, "pull": 0.3, "centre_pull": 0.9},
]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("own", "momentum"), [(0.5, 0.0), (0.0, 0.8)], ids=["EASGD", "EAMSGD"])
def test_workers_and_centre_equal_their_oracle(form: dict[str, Any], n: int, own: float, momentum: float) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = train(comm, EASGD(**form, momentum=momentum), problem, RATES, starts=starts, momentum=own)
        with worker.consensus() as model:
            shipped = flat(model)
        (r,) = worker.replicas
        return r.state.get("position", r.x), shipped

    found, shipped = (torch.stack(each) for each in zip(*run_threads(n, body), strict=True))
    machine = Elastic(**form, momentum=momentum)
    path(machine, problem.gradient, starts, Descent(RATES, momentum=own), RATES)
    assert distance(found, machine.position) < 1e-12
    assert torch.equal(shipped, shipped[:1].expand_as(shipped))
    assert distance(shipped[0], machine.centre) < 1e-12


def test_the_paper_s_pull_is_divided_by_the_number_of_workers() -> None:
    assert EASGD().pull_for(4) == 0.9 / 4
    assert EASGD(pull=0.5).pull_for(4) == 0.5
    problem, starts = Regression(3, 6, DOUBLE), starts_of(3)
    shared = together(3, EASGD(period=2), problem, RATES[:6], starts=starts)
    assert torch.equal(shared, together(3, EASGD(period=2, pull=0.9 / 3), problem, RATES[:6], starts=starts))


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_largest_stable_step_is_where_a_quadratic_stops_to_converge(n: int) -> None:
    draw = torch.Generator().manual_seed(n)
    for _ in range(60):
        centre_pull, pull = (float(u) for u in torch.rand(2, generator=draw))
        most = EASGD(centre_pull=centre_pull, pull=pull).largest_step(n)
        for step, shrinks in ((0.98 * most, True), (1.02 * most, False)):
            mean = torch.tensor([[1 - step - pull, pull], [centre_pull, 1 - centre_pull]], dtype=DOUBLE)
            radius = max(float(torch.linalg.eigvals(mean).abs().max()), abs(1 - step - pull))
            assert (radius < 1) == shrinks


def test_pulls_that_are_never_stable_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers and centre would oscillate forever. Their sum must be below 2"):
        EASGD(pull=1.0, centre_pull=1.0).check(2)
    EASGD(pull=1.0, centre_pull=0.99).check(2)


test_recipes_that_cannot_work_are_refused = refusals(
    [
        ({"period": 0}, "period=0"),
        ({"centre_pull": 0.0}, r"centre_pull=0.0: must lie in \(0, 1\]"),
        ({"centre_pull": 1.1}, "overshoot the workers' mean"),
        ({"pull": 1.1}, r"pull=1.1: must lie in \[0, 1\]"),
        ({"momentum": 1.0}, "momentum=1"),
    ],
    lambda words: EASGD(**words),
)


def test_a_second_momentum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its own momentum.*or use EASGD\(period=\d+, momentum=0\)"):
        begin(None, EASGD(momentum=0.9), DoubleWell(), momentum=0.9)
    begin(None, EASGD(), DoubleWell(), momentum=0.9)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_an_average_of_all_moves_the_centre_there_too(momentum: float) -> None:
    problem, starts, strategy = Regression(3, 6, DOUBLE), starts_of(3), EASGD(period=2, momentum=momentum)

    def body(comm: Comm) -> tuple[Tensor, thinwire.Replica]:
        (r,) = go_on(begin(comm, strategy, problem, starts), problem, RATES[:5]).replicas
        before = r.state.get("position", r.x).clone()
        average_outside(strategy, r)
        return before, r

    rows = run_threads(3, body)
    mean = torch.stack([before for before, _ in rows]).mean(0)
    for _, r in rows:
        for x in (r.x, *(r.state[name] for name in r.state)):
            assert torch.allclose(x, mean, rtol=0, atol=1e-15)
