# SPDX-License-Identifier: Apache-2.0
"""Elections: which worker leads, and how losses are recorded."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor

import thinwire
from tests.methods.strategies.leader_runs import DoubleWell, losses_of, starts_of
from tests.oracles.common import Descent
from tests.oracles.machines import Leader, path
from tests.problems import Regression, begin, distance, flat, go_on, quadratic, together, train
from tests.rules import for_each, refusals
from thinwire import Comm, ConfigError, CountingComm, Local, Replica, run_threads
from thinwire.core.replica.replica import as_number
from thinwire.methods.strategies.leader.election import ScoreFunction, best_rank, elect, encode_key
from thinwire.methods.strategies.leader.leader import LeaderSGD
from thinwire.methods.strategies.leader.leader_gradient import LeaderGradientDescent
from thinwire.methods.strategies.leader.multi_leader import MultiLeaderSGD

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
NAN, INF = math.nan, math.inf


def replica(comm: Comm, width: int = 3) -> Replica:
    return Replica(torch.zeros(width), torch.zeros(0), comm, lr=lambda: 1.0)


# -- elections ---------------------------------------------------------------------------------------------------------


@for_each(
    [
        ([3.0, 1.0, 2.0], 1),
        ([1.0, 1.0, 1.0], 0),
        ([2.0, 1.0, 1.0], 1),
        ([NAN, 5.0, 4.0], 2),
        ([-NAN, 5.0, 4.0], 2),
        ([-INF, 5.0, INF], 1),
        ([NAN, INF, -INF], None),
        ([0.0, -1.0, -2.0], 2),
        ([0.0, -0.0, 1.0], 0),
        ([1e-45, 0.0, -1e-45], 2),
        ([3e38, NAN, 3.4e38], 0),
    ]
)
def test_the_least_finite_score_wins_and_the_lowest_rank_among_equals(case: tuple[list[float], int | None]) -> None:
    scores, leader = case
    found = run_threads(3, lambda comm: elect(replica(comm), torch.tensor(scores[comm.rank])))
    assert found == [leader] * 3


def test_score_keys_are_ordered_as_their_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.randn(200, generator=draw) * 10.0**power for power in (-40, -5, 0, 5, 30)])
    r = replica(CountingComm(7, 8))
    keys = torch.cat([encode_key(r, score) for score in scores])
    assert torch.equal(scores[keys.argsort()], scores.sort().values)
    assert {best_rank([int(key)]) for key in keys} == {7}


def test_a_worker_without_a_loss_never_leads() -> None:
    assert run_threads(2, lambda comm: elect(replica(comm), torch.tensor(9.0) if comm.rank else None)) == [1, 1]
    assert run_threads(2, lambda comm: elect(replica(comm), torch.tensor(NAN) if comm.rank else None)) == [None] * 2


def test_if_no_worker_has_a_loss_all_raise_with_the_fix() -> None:
    def body(comm: Comm) -> str:
        worker = begin(comm, LeaderSGD(period=2), quadratic(2, DOUBLE))
        with pytest.raises(ConfigError) as refused:
            for _ in range(2):
                worker.model().sum().backward()
                worker.optimizer.step()
        return str(refused.value)

    for words in run_threads(2, body):
        assert "worker.record_batch(loss=loss) before optimizer.step()" in words


# -- recorded losses --------------------------------------------------------------------------------------------------


def test_a_worker_whose_loss_is_nan_never_leads() -> None:
    well, starts = DoubleWell(0.2), torch.tensor([[-1.1], [0.9], [1.0]], dtype=DOUBLE)

    def loss_of(rank: int, step: int, loss: Tensor) -> Tensor | float:
        return NAN if rank == 0 else loss

    def losses(x: Tensor, k: int) -> Tensor:
        return torch.cat([torch.tensor([INF], dtype=DOUBLE), losses_of(well)(x, k)[1:]])

    expected = path(Leader(2, pull=0.4), well.gradient, starts, Descent(RATES), RATES, losses)[-1]
    found = together(3, LeaderSGD(period=2, pull=0.4), well, RATES, starts=starts, reported=loss_of)
    assert distance(found, expected) < 1e-12


def test_if_no_loss_is_finite_nobody_is_pulled_and_there_is_one_warning() -> None:
    problem, starts = Regression(2, STEPS, DOUBLE), starts_of(2)

    def body(comm: Comm, strategy: thinwire.Strategy) -> Tensor:
        return flat(train(comm, strategy, problem, RATES, starts=starts, reported=lambda *_: INF).model)

    for strategy in (
        LeaderSGD(period=2),
        LeaderGradientDescent(),
        MultiLeaderSGD(2, 0.1, 2, 4),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.stack(run_threads(2, lambda comm, s=strategy: body(comm, s)))
        assert sorted(str(each.message)[:6] for each in caught) == ["rank 0", "rank 1"]
        assert torch.equal(found, together(2, Local(), problem, RATES, starts=starts))


def test_a_window_that_is_not_full_is_averaged_over_the_losses_it_holds() -> None:
    """Rank 1 reports a loss at half of its steps only. They are worse, so it must not lead for having fewer."""
    well, starts = DoubleWell(), torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)

    def loss_of(rank: int, step: int, loss: Tensor) -> float | None:
        return 1.0 if rank == 0 else None if step % 2 else 1.5

    found = together(2, LeaderSGD(period=4, pull=1.0), well, [0.0] * 4, starts=starts, reported=loss_of)
    assert torch.equal(found, torch.ones_like(found))


def test_an_exponential_mean_decays_and_recovers_from_a_nan() -> None:
    values = [[4.0, NAN, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    starts = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)

    def leader(steps: int) -> float:
        found = together(
            2,
            LeaderSGD(period=steps, pull=1.0, metric="ema"),
            DoubleWell(),
            [0.0] * steps,
            starts=starts,
            reported=lambda rank, step, _: values[rank][step],
        )
        assert float(found[0]) == float(found[1])
        return float(found[0])

    assert [leader(1), leader(2), leader(3), leader(4)] == [-1.0, -1.0, 1.0, 1.0]


def test_a_custom_score_function_decides() -> None:
    well, starts = DoubleWell(), torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    strategy = LeaderSGD(period=1, pull=1.0, metric=ScoreFunction(lambda r: r.x.sum(), "the leftmost"))
    assert repr(strategy.metric) == "ScoreFunction('the leftmost')"
    assert together(2, strategy, well, [0.0], starts=starts).tolist() == [[-1.0], [-1.0]]


test_a_score_function_without_one_number_is_refused_before_the_first_step = refusals(
    [
        (lambda r: r.x, r"has shape \(3,\), but must be one number. Take its mean"),
        (lambda r: torch.zeros((), device="meta"), "returned a tensor on meta. Compute it on cpu"),
    ],
    lambda answer: begin(None, LeaderSGD(metric=ScoreFunction(answer)), quadratic(1, DOUBLE)),
)


def test_the_arguments_of_record_batch_are_checked_and_reset_after_the_step() -> None:
    worker = begin(None, LeaderSGD(), quadratic(1, DOUBLE))
    (r,) = worker.replicas
    worker.record_batch(3)
    assert (r.samples, r.loss) == (3, None)
    worker.record_batch(loss=torch.tensor([2.0], dtype=DOUBLE, requires_grad=True))
    assert r.samples == 3
    assert r.loss is not None
    assert (float(r.loss), r.loss.dtype, r.loss.shape, r.loss.requires_grad) == (2, torch.float32, (), False)
    assert r.part("some", slice(1)).loss is r.loss
    with pytest.raises(ConfigError, match=r"loss: has shape \(2,\), but must be one number"):
        worker.record_batch(loss=torch.zeros(2))
    with pytest.raises(ConfigError, match="samples=-1"):
        worker.record_batch(-1, loss=1.0)
    go_on(worker, quadratic(1, DOUBLE), [0.1])
    assert (r.samples, r.loss) == (1, None)
    assert as_number(2, torch.zeros(1), "loss").dtype == torch.float32
