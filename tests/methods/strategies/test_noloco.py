# SPDX-License-Identifier: Apache-2.0
"""NoLoCo: what pairs exchange, that workers come together, and what is refused. The battery has its oracle."""

from __future__ import annotations

import pytest
import torch

import thinwire
from tests.problems import quadratic, together
from thinwire import Comm, ConfigError, DiLoCo, NoLoCo, OnePeerExponential, OuterOptimizer, RandomMatching, Replica
from thinwire.planning.plan.traffic import DryRun

DOUBLE = torch.float64


def test_the_mean_of_workers_under_noloco_moves_as_under_diloco_with_heavy_ball_momentum() -> None:
    # Gradients that do not depend on the parameters, as the workers' differ.
    outer = OuterOptimizer("SGD", lr=0.7, momentum=0.5)
    starts = torch.zeros(4, 6)
    means = list[torch.Tensor]()
    for strategy in (NoLoCo(period=3), DiLoCo(period=3, outer=outer)):

        def body(comm: Comm, strategy: thinwire.Strategy = strategy) -> torch.Tensor:
            r = Replica(starts[comm.rank].clone(), torch.empty(0), comm, lr=lambda: 0.1)
            strategy.start(r)
            draw = torch.Generator().manual_seed(comm.rank)
            for _ in range(12):
                r.x += torch.randn(6, generator=draw)
                r.step += 1
                strategy.after_step(r)
            return r.x.clone()

        means.append(torch.stack(thinwire.run_threads(4, body)).mean(0))
    assert torch.allclose(*means, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pull", "vectors"), [(None, 1), (0.7, 1), (0.9, 2)])
def test_noloco_sends_one_vector_a_round_and_two_with_a_pull_of_its_own(pull: float | None, vectors: int) -> None:
    strategy = NoLoCo(period=2, pull=pull)
    run = DryRun(strategy, [100], workers=2, rank=0, dtype=torch.float32, bucket_bytes=1)
    assert sum(run.step().sent for _ in range(6)) == 3 * vectors * 400.0


def test_a_worker_without_a_partner_takes_its_outer_step_alone() -> None:
    found = together(3, NoLoCo(period=1, momentum=0.0), quadratic(3, DOUBLE), [0.1])
    alone = next(rank for rank in range(3) if not RandomMatching().peers(rank, 3, 0).dst)
    own = together(3, DiLoCo(period=100), quadratic(3, DOUBLE), [0.1])
    start = together(3, DiLoCo(period=100), quadratic(3, DOUBLE), [])
    assert torch.allclose(found[alone] - start[alone], 0.7 * (own[alone] - start[alone]), rtol=0, atol=1e-15)


def test_noloco_is_refused_where_workers_would_drift_apart() -> None:
    with pytest.raises(ConfigError, match="differences between workers would grow by"):
        NoLoCo(pull=3.2).check(2)
    with pytest.raises(ConfigError, match="no message travels"):
        NoLoCo(RandomMatching(draws=1)).check(4)
    NoLoCo(OnePeerExponential()).check(6)
    for make, words in (
        (lambda: NoLoCo(period=0), "period=0: must be at least 1"),
        (lambda: NoLoCo(lr=0.0), "lr=0.0: must be positive"),
        (lambda: NoLoCo(momentum=1.0), r"momentum=1.0: must lie in \[0, 1\)"),
        (lambda: NoLoCo(pull=0.0), "pull=0.0: must be positive and finite. Nothing else keeps workers together"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
