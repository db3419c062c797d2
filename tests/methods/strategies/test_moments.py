# SPDX-License-Identifier: Apache-2.0
"""Moments of the optimizer that are averaged at periods of their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.elastic.fleets import Kill, run_fleet, survivors
from tests.engine import attach, momentum
from tests.oracles.updates import desynced_adam
from tests.problems import Regression, distance, flat
from thinwire import Comm, DiLoCo, LocalSGD, OuterOptimizer, Strategy
from thinwire.errors import ConfigError

STEPS, RATE, PERIOD = 26, 0.02, 2
PLAIN = OuterOptimizer("SGD", lr=1.0)


def trained(strategy: Strategy, size: int = 3) -> tuple[Tensor, list[float]]:
    problem = Regression(size, STEPS, torch.float64)

    def body(comm: Comm) -> tuple[Tensor, float]:
        model = problem.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for step in range(STEPS):
            optimizer.zero_grad()
            problem.loss(model, comm.rank, step).backward()
            optimizer.step()
        return flat(model), worker.stats().payload_bytes

    found = thinwire.run_threads(size, body)
    return torch.stack([x for x, _ in found]), [sent for _, sent in found]


@pytest.mark.parametrize("periods", [(4,), (8, 2)])
@pytest.mark.parametrize(
    "make",
    [
        lambda periods: LocalSGD(PERIOD, moments=periods),
        lambda periods: DiLoCo(period=PERIOD, outer=PLAIN, moments=periods),
    ],
    ids=["LocalSGD", "DiLoCo"],
)
def test_moments_at_their_own_periods_equal_the_oracle(periods: tuple[int, ...], make: object) -> None:
    problem = Regression(3, STEPS, torch.float64)
    real, sent = trained(make(periods))  # type: ignore[operator]
    expected = desynced_adam(
        problem.gradient, problem.start.expand(3, -1), STEPS, rate=RATE, period=PERIOD, periods=periods
    )
    assert distance(real, expected) < 1e-12
    _, without = trained(make(()))  # type: ignore[operator]
    averages = sum(STEPS // period for period in periods)
    assert sent[0] - without[0] == pytest.approx(averages * 2 * 2 / 3 * 8 * problem.start.numel())


def test_fragments_and_delays_average_the_moments_of_the_whole_vector() -> None:
    plain, moments = (
        trained(DiLoCo(period=4, outer=PLAIN, fragments=2, delay=1, moments=periods))[0] for periods in ((), (4, 8))
    )
    assert plain.isfinite().all() and moments.isfinite().all() and distance(plain, moments) > 0


def test_moments_are_averaged_through_losses_and_joins() -> None:
    strategy = LocalSGD(3, moments=(6,))
    ends = survivors(run_fleet(3, strategy, steps=18, kills=(Kill(1, 7),), joins=(4,), optimizer=momentum))
    assert len(ends) == 3
    assert all(end.agreed is not None and torch.equal(end.agreed, ends[0].agreed) for end in ends)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_periods_that_cannot_be_meant_are_refused(kind: type[LocalSGD]) -> None:
    with pytest.raises(ConfigError, match=r"moments=\(6,\): each must be a multiple of period=4"):
        kind(period=4, moments=(6,))

    def error(comm: Comm) -> str:
        with pytest.raises(ConfigError) as found:
            attach(comm, kind(period=4, moments=(4, 8)), optimizer=momentum)
        return str(found.value)

    words = "moments=(4, 8) with SGD: it has 1 moments. Give at most one period for each"
    assert thinwire.run_threads(2, error) == [words] * 2
