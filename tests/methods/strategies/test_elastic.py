# SPDX-License-Identifier: Apache-2.0
"""EASGD and EAMSGD: they equal their papers, and what holds of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.methods.strategies.leader_runs import DoubleWell, begin, go_on, together, train
from tests.oracles.common import Descent
from tests.oracles.leader import eamsgd, easgd, starts_of
from tests.problems import Regression, average_outside, distance, flat
from tests.rules import refusals
from thinwire import Comm, ConfigError, run_threads
from thinwire.methods.strategies.local.elastic_averaging import EASGD
from thinwire.planning.plan.traffic import DryRun

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
FORMS: list[dict[str, Any]] = [
    {"period": 1, "pull": 0.2, "centre_pull": 0.6},
    {"period": 5, "pull": 0.3, "centre_pull": 0.9},
]


def workers_and_centre(
    comm: Comm | None, strategy: EASGD, problem: Any, starts: Tensor | None, rates: list[float], **settings: Any
) -> tuple[list[float], list[float]]:
    """Where a worker is and what is shipped, after training."""
    worker = train(comm, strategy, problem, rates, starts=starts, **settings)
    with worker.consensus() as model:
        shipped = flat(model)
    (r,) = worker.replicas
    return r.state.get("position", r.x).tolist(), shipped.tolist()


def stacked(rows: list[tuple[list[float], list[float]]]) -> tuple[Tensor, Tensor]:
    for _, centre in rows:
        assert centre == rows[0][1]
    return torch.tensor([x for x, _ in rows], dtype=DOUBLE), torch.tensor(rows[0][1], dtype=DOUBLE)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_elastic_averaging_equals_its_oracle(form: dict[str, Any], n: int) -> None:
    problem, starts, settings = Regression(n, STEPS, DOUBLE), starts_of(n), {"momentum": 0.5}
    found = stacked(run_threads(n, lambda c: workers_and_centre(c, EASGD(**form), problem, starts, RATES, **settings)))
    expected = easgd(problem.gradient, starts, Descent(RATES, **settings), STEPS, **form)
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < 1e-12


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_with_momentum_it_equals_the_oracle_that_looks_ahead(form: dict[str, Any], n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    strategy = EASGD(**form, momentum=0.8)
    found = stacked(run_threads(n, lambda c: workers_and_centre(c, strategy, problem, starts, RATES)))
    expected = eamsgd(problem.gradient, starts, RATES, **form, momentum=0.8)
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < 1e-12


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


def test_a_round_sends_one_all_reduce() -> None:
    for n in (2, 4, 8):
        run = DryRun(EASGD(period=8), [840], workers=n, rank=0, dtype=torch.float32, bucket_bytes=1)
        assert sum(run.step().sent for _ in range(16)) == 2 * 2 * (n - 1) / n * 4 * 840


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
