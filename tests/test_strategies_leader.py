"""LSGD and LGD: they equal their papers, and what holds of them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic import Comm, ConfigError, CountingComm, Local, Replica, run_threads
from laconic.election import (
    Metric,
    as_number,
    ballot,
    chain_from,
    elect,
    pass_along_,
    pass_between_nodes_,
    winner,
)
from laconic.plan.traffic import DryRun
from laconic.strategies.leader import LSGD
from laconic.strategies.leader_gradient import LGD
from tests.leader_runs import DoubleWell, begin, go_on, losses_of, together, train
from tests.oracles import Descent
from tests.oracles_leader import late_lsgd, lgd, lsgd
from tests.pool import run_processes
from tests.problems import Regression, distance, flat, quadratic

DOUBLE = torch.float64
STEPS = 24
RATES = [0.1] * STEPS
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": True}


def starts_of(n: int, width: int = 34, seed: int = 0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) / 2


def replica(comm: Comm, width: int = 3) -> Replica:
    return Replica(torch.zeros(width), torch.zeros(0), comm, lr=lambda: 1.0)


# -- elections ---------------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("scores", "leader"),
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
    ],
)
def test_the_least_finite_score_wins_and_the_lowest_rank_among_equals(scores: list[float], leader: int | None) -> None:
    found = run_threads(3, lambda comm: elect(replica(comm), torch.tensor(scores[comm.rank])))
    assert found == [leader] * 3


def test_ballots_are_ordered_as_their_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.cat([torch.randn(200, generator=draw) * 10.0**power for power in (-40, -5, 0, 5, 30)])
    r = replica(CountingComm(7, 8))
    keys = torch.cat([ballot(r, score) for score in scores])
    assert torch.equal(scores[keys.argsort()], scores.sort().values)
    assert {winner([int(key)]) for key in keys} == {7}


def test_a_worker_that_was_told_nothing_never_leads() -> None:
    assert run_threads(2, lambda comm: elect(replica(comm), torch.tensor(9.0) if comm.rank else None)) == [1, 1]
    assert run_threads(2, lambda comm: elect(replica(comm), torch.tensor(NAN) if comm.rank else None)) == [None] * 2


def test_where_nobody_is_told_a_loss_all_are_told_how() -> None:
    def body(comm: Comm) -> str:
        attached = begin(comm, LSGD(period=2), quadratic(2, DOUBLE))
        with pytest.raises(ConfigError) as refused:
            for _ in range(2):
                attached.model().sum().backward()
                attached.optimizer.step()
        return str(refused.value)

    for words in run_threads(2, body):
        assert "replica.saw(loss=loss) before optimizer.step()" in words


def test_one_election_is_eight_bytes() -> None:
    def body(comm: Comm) -> tuple[float, int]:
        elect(replica(comm), torch.tensor(1.0))
        return comm.meter.payload_bytes, comm.meter.messages

    assert run_threads(4, body) == [(8, 1)] * 4


# -- the papers' algorithms --------------------------------------------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "every step": {"period": 1, "pull": 0.3},
    "periodic": {"period": 4, "pull": 0.25},
    "towards the last leader": {"period": 3, "pull": 0.1, "proximal": 0.2},
    "nodes": {"period": 2, "pull": 0.2, "node_size": 2, "global_period": 6, "global_pull": 0.4},
    "nodes towards their last leaders": {
        "period": 2,
        "pull": 0.2,
        "node_size": 2,
        "global_period": 4,
        "global_pull": 0.4,
        "proximal": 0.3,
    },
}


@pytest.mark.parametrize("n", [2, 4, 6])
@pytest.mark.parametrize("form", list(FORMS))
def test_leader_sgd_equals_its_oracle(form: str, n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    found = together(n, LSGD(**FORMS[form]), problem, RATES, starts=starts, **MOMENTUM)
    led: list[int] = []
    expected = lsgd(
        problem.gradient, losses_of(problem), starts, Descent(RATES, **MOMENTUM), STEPS, led=led, **FORMS[form]
    )
    assert distance(found, expected) < 1e-12
    assert len(set(led)) > 1 or n == 2


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_leader_that_travels_while_workers_train_equals_its_oracle(n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    found = together(n, LSGD(period=4, pull=0.3, overlap=True), problem, RATES, starts=starts)
    expected = late_lsgd(problem.gradient, losses_of(problem), starts, Descent(RATES), STEPS, period=4, pull=0.3)
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("n", [2, 3, 5])
def test_leader_gradient_descent_equals_its_oracle(n: int) -> None:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    found = together(n, LGD(pull=0.7), problem, RATES, starts=starts)
    assert distance(found, lgd(problem.gradient, losses_of(problem), starts, 0.1, STEPS, pull=0.7)) < 1e-12


def everything_on_processes(n: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    problem, starts = Regression(n, STEPS, DOUBLE), starts_of(n)
    recipes = {form: LSGD(**words) for form, words in FORMS.items()}
    recipes["late"] = LSGD(period=4, pull=0.3, overlap=True)
    found: dict[str, list[float]] = {}
    sent: dict[str, float] = {}
    for name, recipe in {**recipes, "gradient": LGD(pull=0.7)}.items():
        attached = begin(None, recipe, problem, starts)
        before = attached.comm.meter.payload_bytes
        go_on(attached, problem, RATES)
        sent[name] = attached.comm.meter.payload_bytes - before
        attached.detach()
        found[name] = flat(attached.model).tolist()
    return found, sent


def test_on_processes_as_on_threads() -> None:
    rows = run_processes(4, everything_on_processes, 4)
    problem, starts = Regression(4, STEPS, DOUBLE), starts_of(4)
    losses = losses_of(problem)
    expected = {
        form: lsgd(problem.gradient, losses, starts, Descent(RATES), STEPS, **words) for form, words in FORMS.items()
    }
    expected["late"] = late_lsgd(problem.gradient, losses, starts, Descent(RATES), STEPS, period=4, pull=0.3)
    expected["gradient"] = lgd(problem.gradient, losses, starts, 0.1, STEPS, pull=0.7)
    for name, each in expected.items():
        assert distance(torch.tensor([found[name] for found, _ in rows], dtype=DOUBLE), each) < 1e-12, name
    size = 34 * 8
    assert sum(sent["periodic"] for _, sent in rows) == STEPS / 4 * (3 * size + 4 * 8)
    assert sum(sent["late"] for _, sent in rows) == STEPS / 4 * (3 * size + 4 * 8) - 2 * size  # the last is on its way


# -- identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [LSGD(period=3, pull=0), LGD(pull=0)], ids=repr)
def test_without_a_pull_workers_train_by_themselves_and_say_nothing(strategy: laconic.Strategy) -> None:
    problem, starts = Regression(3, STEPS, torch.float32), starts_of(3).float()

    def body(comm: Comm) -> tuple[Tensor, float]:
        attached = begin(comm, strategy, problem, starts, **MOMENTUM)
        before = comm.meter.payload_bytes
        go_on(attached, problem, RATES)
        return flat(attached.model), comm.meter.payload_bytes - before

    apart = together(3, Local(), problem, RATES, starts=starts, **MOMENTUM)
    for rank, (x, sent) in enumerate(run_threads(3, body)):
        assert torch.equal(x, apart[rank])
        assert sent == 0


def test_the_whole_way_at_every_step_makes_all_the_best_of_them() -> None:
    found = together(
        4, LSGD(period=1, pull=1.0), Regression(4, 9, torch.float32), RATES[:9], starts=starts_of(4).float()
    )
    assert all(torch.equal(x, found[0]) for x in found)


@pytest.mark.parametrize("strategy", [LSGD(period=2), LSGD(period=2, overlap=True), LGD()], ids=repr)
def test_one_worker_alone_is_the_plain_optimizer(strategy: laconic.Strategy) -> None:
    problem = Regression(1, STEPS, DOUBLE)
    attached = train(None, strategy, problem, RATES, **MOMENTUM)
    assert attached.comm.meter.payload_bytes == 0
    assert torch.equal(flat(attached.model), flat(train(None, Local(), problem, RATES, **MOMENTUM).model))
    with attached.consensus() as model:
        assert torch.equal(flat(model), flat(attached.model))


def test_nodes_that_meet_at_once_are_one_leader_for_all() -> None:
    problem, starts = Regression(4, STEPS, DOUBLE), starts_of(4)
    single = together(4, LSGD(period=3, pull=0.3), problem, RATES, starts=starts)
    nodes = LSGD(period=3, pull=0.0, node_size=2, global_period=3, global_pull=0.3)
    assert torch.equal(together(4, nodes, problem, RATES, starts=starts), single)
    whole = LSGD(period=3, pull=0.3, node_size=4, global_period=3, global_pull=0.0)
    assert torch.equal(together(4, whole, problem, RATES, starts=starts), single)


def test_ranks_may_change_places() -> None:
    order = [2, 0, 3, 1]
    starts, well = starts_of(4, 3), DoubleWell(0.1, 3)
    strategy = LSGD(period=2, pull=0.2)
    found = together(4, strategy, well, RATES, starts=starts)
    assert torch.equal(together(4, strategy, well, RATES, starts=starts[order]), found[order])


def test_the_best_of_all_is_where_its_own_step_took_it() -> None:
    well, starts = DoubleWell(0.3, 3), starts_of(4, 3)

    def body(comm: Comm) -> tuple[Tensor, float]:
        attached = begin(comm, LSGD(period=1, pull=0.5, node_size=2, global_period=1), well, starts)
        go_on(attached, well, [0.1])
        return flat(attached.model), attached.observations()["leader"]

    (_, leader), *_ = rows = run_threads(4, body)
    place = int(leader)
    assert place == int(losses_of(well)(starts, 0).argmin())
    assert torch.equal(rows[place][0], starts[place] - 0.1 * well.gradient(starts[place], 0))


@pytest.mark.parametrize("n", [3, 4, 6])
def test_two_stages_bring_what_one_broadcast_brings(n: int) -> None:
    width = 700_000  # several pieces

    def body(comm: Comm) -> bool:
        x = torch.randn(width, generator=torch.Generator().manual_seed(comm.rank))
        flat_, chained = x.clone(), x.clone()
        comm.broadcast_(flat_, n - 1).wait()
        pass_along_(comm, chained, chain_from(n - 1, range(n)))
        staged = [pass_between_nodes_(comm, x.clone(), n - 1, size) for size in (1, 2, 3, n) if n % size == 0]
        return torch.equal(chained, flat_) and all(torch.equal(each, flat_) for each in staged)

    assert all(run_threads(n, body))


# -- landscapes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pull", "crosses"), [(0.24, False), (0.26, True)])
def test_a_follower_leaves_its_well_from_a_quarter_on(pull: float, crosses: bool) -> None:
    starts = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    # The wells are equally deep, so that rank 0 leads for ever.
    found = together(2, LGD(pull=pull), DoubleWell(), [0.5] * 500, starts=starts)
    assert float(found[0]) == 1.0
    expected = 1.0 if crosses else -(1 + math.sqrt(1 - 4 * pull)) / 2
    assert float(found[1]) == pytest.approx(expected, abs=1e-9)


def test_common_stationary_points_are_left_alone() -> None:
    starts = torch.tensor([[1.0], [1.0], [1.0]], dtype=DOUBLE)
    for strategy in (LGD(pull=0.5), LSGD(period=1, pull=0.5)):
        assert torch.equal(together(3, strategy, DoubleWell(), [0.1] * 5, starts=starts), starts)


def test_wherever_all_come_to_rest_the_leader_s_gradient_is_zero() -> None:
    well, starts = DoubleWell(0.05, 4), starts_of(4, 4, seed=3) * 3
    found = together(4, LGD(pull=0.1), well, [0.25] * 400, starts=starts)
    leader = int(losses_of(well)(found, 0).argmin())
    assert well.gradient(found[leader], 0).abs().max() < 1e-9
    assert distance(lgd(well.gradient, losses_of(well), found, 0.25, 1, pull=0.1), found) < 1e-9


@pytest.mark.parametrize(("share", "kept"), [(2, 0.0), (4, 0.25)])
def test_one_step_descends_at_least_as_far_as_smoothness_says(share: int, kept: float) -> None:
    """With eta <= 1/(2L) and eta lambda <= 1/(share kappa): smoothness, and strong convexity between x and z."""
    draw = torch.Generator().manual_seed(share)
    worst = -INF
    for _ in range(1000):
        least, ratio, eta, pull = (float(u) for u in torch.rand(4, generator=draw, dtype=DOUBLE))
        least, ratio = 0.1 + least, 1 + 20 * ratio**4
        eta, pull = eta / (2 * least * ratio), pull / (share * ratio * eta / (2 * least * ratio))
        h = least * (1 + (ratio - 1) * torch.rand(4, generator=draw, dtype=DOUBLE))
        h[0], h[1] = least, least * ratio
        points = torch.randn(2, 4, generator=draw, dtype=DOUBLE)
        z, x = points[(h * points.square()).sum(1).argsort()]
        f_x, f_z = ((h * y.square()).sum() / 2 for y in (x, z))
        after = x - eta * (h * x + pull * (x - z))
        least_descent = eta * least * f_x + eta * pull * (f_x - f_z + kept * least * (x - z).square().sum())
        worst = max(worst, float((h * after.square()).sum() / 2 - (f_x - least_descent)))
        expected = lgd(
            lambda y, k, h=h: h * y, lambda y, k, h=h: (h * y.square()).sum(1) / 2, points, eta, 1, pull=pull
        )
        assert any(torch.allclose(row, after, rtol=1e-12, atol=0) for row in expected)
    assert -0.1 < worst < 1e-12


# -- who is told what --------------------------------------------------------------------------------------------------


def test_a_worker_whose_loss_is_nan_never_leads() -> None:
    well, starts = DoubleWell(0.2), torch.tensor([[-1.1], [0.9], [1.0]], dtype=DOUBLE)

    def told(rank: int, step: int, loss: Tensor) -> Tensor | float:
        return NAN if rank == 0 else loss

    expected = lsgd(
        well.gradient,
        lambda x, k: torch.cat([torch.tensor([INF], dtype=DOUBLE), losses_of(well)(x, k)[1:]]),
        starts,
        Descent(RATES),
        STEPS,
        period=2,
        pull=0.4,
    )
    assert distance(together(3, LSGD(period=2, pull=0.4), well, RATES, starts=starts, told=told), expected) < 1e-12


def test_where_no_loss_is_finite_nobody_is_pulled_and_one_warning_says_so() -> None:
    problem, starts = Regression(2, STEPS, DOUBLE), starts_of(2)

    def body(comm: Comm, strategy: laconic.Strategy) -> Tensor:
        return flat(train(comm, strategy, problem, RATES, starts=starts, told=lambda *_: INF).model)

    for strategy in (LSGD(period=2), LGD(), LSGD(period=2, overlap=True), LSGD(2, 0.1, 2, 4)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.stack(run_threads(2, lambda comm, s=strategy: body(comm, s)))
        assert sorted(str(each.message)[:6] for each in caught) == ["rank 0", "rank 1"]
        assert torch.equal(found, together(2, Local(), problem, RATES, starts=starts))


def test_a_window_that_is_not_full_is_averaged_over_what_it_holds() -> None:
    """Half of rank 1's steps tell nothing; what it told is worse, and it must not lead for having told less."""
    well, starts = DoubleWell(), torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)

    def told(rank: int, step: int, loss: Tensor) -> float | None:
        return 1.0 if rank == 0 else None if step % 2 else 1.5

    found = together(2, LSGD(period=4, pull=1.0), well, [0.0] * 4, starts=starts, told=told)
    assert torch.equal(found, torch.ones_like(found))


def test_an_exponential_mean_forgets_and_survives_a_nan() -> None:
    values = [[4.0, NAN, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]
    starts = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)

    def leader(steps: int) -> float:
        found = together(
            2,
            LSGD(period=steps, pull=1.0, metric="ema"),
            DoubleWell(),
            [0.0] * steps,
            starts=starts,
            told=lambda rank, step, _: values[rank][step],
        )
        assert float(found[0]) == float(found[1])
        return float(found[0])

    assert [leader(1), leader(2), leader(3), leader(4)] == [-1.0, -1.0, 1.0, 1.0]


def test_a_metric_of_one_s_own_decides() -> None:
    well, starts = DoubleWell(), torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    strategy = LSGD(period=1, pull=1.0, metric=Metric(lambda r: r.x.sum(), "the leftmost"))
    assert repr(strategy.metric) == "Metric('the leftmost')"
    assert together(2, strategy, well, [0.0], starts=starts).tolist() == [[-1.0], [-1.0]]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda r: r.x, r"a tensor of shape \(3,\), not one number; take its mean"),
        (lambda r: torch.zeros((), device="meta"), "returned a tensor on meta; compute it on cpu"),
    ],
)
def test_a_metric_that_answers_badly_is_refused_before_the_first_step(answer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        begin(None, LSGD(metric=Metric(answer)), quadratic(1, DOUBLE))


def test_what_is_said_of_a_step_is_checked_and_forgotten_after_it() -> None:
    attached = begin(None, LSGD(), quadratic(1, DOUBLE))
    (r,) = attached.replicas
    attached.saw(3)
    assert (r.samples, r.loss) == (3, None)
    attached.saw(loss=torch.tensor([2.0], dtype=DOUBLE, requires_grad=True))
    assert r.samples == 3
    assert r.loss is not None
    assert (float(r.loss), r.loss.dtype, r.loss.shape, r.loss.requires_grad) == (2, torch.float32, (), False)
    assert r.part("some", slice(1)).loss is r.loss
    with pytest.raises(ConfigError, match=r"loss: a tensor of shape \(2,\), not one number"):
        attached.saw(loss=torch.zeros(2))
    with pytest.raises(ConfigError, match="samples=-1"):
        attached.saw(-1, loss=1.0)
    go_on(attached, quadratic(1, DOUBLE), [0.1])
    assert (r.samples, r.loss) == (1, None)
    assert as_number(2, torch.zeros(1), "loss").dtype == torch.float32


# -- sending only where somebody stands out ----------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "sends"), [(0.0, False), (0.1, False), (50.0, True), (INF, True)])
def test_the_leader_is_sent_only_where_somebody_stands_out(gap: float, sends: bool) -> None:
    """Losses of 0 and 1 in turn have a standard error of about a third; of a gap of 50 that is nothing."""
    well, starts = DoubleWell(), torch.tensor([[1.0], [-1.0], [1.0]], dtype=DOUBLE)

    def body(comm: Comm) -> tuple[bool, float]:
        attached = begin(comm, LSGD(period=4, pull=1.0, certainty=2.0), well, starts)
        before = comm.meter.payload_bytes
        go_on(attached, well, [0.0] * 4, told=lambda rank, step, _: step % 2 + (gap if rank == 1 else 0.0))
        return float(flat(attached.model)) == 1.0, comm.meter.payload_bytes - before

    found = run_threads(3, body)
    assert [moved for moved, _ in found] == [True, sends, True]
    assert [sent for _, sent in found] == pytest.approx([8 + 2 * 8 + (2 / 3 * 8 if sends else 0)] * 3)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_round_carries_half_of_what_an_average_carries(n: int) -> None:
    elements = 840

    def sent(strategy: laconic.Strategy) -> float:
        run = DryRun(strategy, [elements], workers=n, rank=0, dtype=torch.float32, bucket_bytes=1)
        return sum(run.step().sent for _ in range(16))

    assert sent(LSGD(period=8)) == 2 * ((n - 1) / n * 4 * elements + 8)
    assert sent(LSGD(period=8)) - 2 * 8 == sent(laconic.LocalSGD(period=8)) / 2
    assert sent(LGD()) == 16 * ((n - 1) / n * 4 * elements + 8)


def test_between_nodes_the_leader_goes_once_for_each_other_node() -> None:
    """Bytes that cross from one node to another, and those that do not."""
    problem, n, size = quadratic(6, DOUBLE, width=50), 6, 2
    crossed: list[tuple[int, int, int]] = []

    def body(comm: Comm) -> None:
        attached = begin(comm, LSGD(period=1, pull=0.1, node_size=size, global_period=2), problem, starts_of(n, 50))
        plain = comm._exchange

        def watched(x: Tensor, to: Any, frm: Any) -> Any:
            crossed.extend((comm.step, comm.rank // size - j // size, x.numel()) for j in to)
            return plain(x, to, frm)

        comm._exchange = watched  # type: ignore[method-assign]
        go_on(attached, problem, [0.01] * 2)

    run_threads(n, body)
    vectors = [(step, node) for step, node, numel in crossed if numel == 50]
    assert sum(node != 0 for _, node in vectors) == 2  # three nodes, one global round
    assert (
        sum(node == 0 for _, node in vectors) == 3 + 3 + 3
    )  # two local rounds, and the second stage of the global one


# -- saving ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [
        LSGD(period=4, pull=0.2, proximal=0.1),
        LSGD(period=4, metric="ema"),
        LSGD(period=4, overlap=True),
        LSGD(period=2, node_size=2, global_period=4, proximal=0.2),
        LGD(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("first", [3, 5, 6])
def test_a_run_resumed_in_the_middle_of_a_round_is_the_uninterrupted_one(
    strategy: laconic.Strategy, first: int
) -> None:
    problem, starts = Regression(4, 13, torch.float32), starts_of(4).float()

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        attached = go_on(begin(comm, strategy, problem, starts, **MOMENTUM), problem, RATES[:first])
        saved = attached.state_dict()
        go_on(attached, problem, RATES[first:13], first)
        again = begin(comm, strategy, problem, starts, **MOMENTUM)
        again.load_state_dict(saved)
        go_on(again, problem, RATES[first:13], first)
        return flat(attached.model), flat(again.model)

    for through, resumed in run_threads(4, body, deadline_seconds=20):
        assert torch.equal(through, resumed)


# -- what is shipped ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [LSGD(period=4), LSGD(period=4, result="mean"), LGD()], ids=repr)
def test_what_is_shipped_is_the_leader_or_the_mean(strategy: laconic.Strategy) -> None:
    well, starts = DoubleWell(0.1, 3), starts_of(3, 3)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        attached = begin(comm, strategy, well, starts)
        with attached.consensus() as model:
            untrained = flat(model)
        go_on(attached, well, [0.0] * 3)
        with attached.consensus() as model:
            return untrained, flat(model)

    best = starts[int(losses_of(well)(starts, 0).argmin())]
    for untrained, shipped in run_threads(3, body):
        assert torch.allclose(untrained, starts.mean(0), rtol=0, atol=1e-15)
        expected = starts.mean(0) if getattr(strategy, "result", "") == "mean" else best
        assert torch.allclose(shipped, expected, rtol=0, atol=1e-15)


def test_an_average_of_all_lets_a_late_leader_go() -> None:
    problem, starts = Regression(3, 6, DOUBLE), starts_of(3)
    strategy = LSGD(period=4, overlap=True)

    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        attached = go_on(begin(comm, strategy, problem, starts), problem, RATES[:5])
        (r,) = attached.replicas
        before = r.x.clone()
        strategy.average_(r)
        assert not r.inflight
        return before, r.x.clone()

    rows = run_threads(3, body)
    mean = torch.stack([before for before, _ in rows]).mean(0)
    for _, after in rows:
        assert torch.allclose(after, mean, rtol=0, atol=1e-15)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"pull": 1.5}, r"pull=1.5: must lie in \[0, 1\]"),
        ({"pull": -0.1}, "pull=-0.1"),
        ({"pull": NAN}, "pull=nan"),
        ({"proximal": 2.0}, "proximal=2.0"),
        ({"period": 0}, "period=0: must be at least 1"),
        ({"node_size": 0}, "node_size=0"),
        ({"node_size": 2}, "nodes need both"),
        ({"global_period": 32}, "nodes need both"),
        ({"global_pull": 0.1}, "without nodes there is one pull"),
        ({"node_size": 2, "global_period": 17}, "must be a multiple of period=16, such as 64"),
        ({"node_size": 2, "global_period": 32, "global_pull": 3.0}, "global_pull=3.0"),
        ({"certainty": -1.0}, "certainty=-1.0"),
        ({"certainty": 2.0, "metric": "ema"}, "needs metric='window'"),
        ({"certainty": 2.0, "period": 1}, "over at least 2 steps"),
        ({"overlap": True, "proximal": 0.1}, "the leader travels alone"),
        ({"metric": "median"}, "metric"),
        ({"result": "centre"}, "result"),
    ],
)
def test_recipes_that_cannot_work_are_refused(words: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LSGD(**words)


def test_workers_that_a_recipe_cannot_serve_are_refused() -> None:
    with pytest.raises(ConfigError, match="node_size=2 with 3 workers"):
        LSGD(node_size=2, global_period=32).check(3)
    with pytest.raises(ConfigError, match="takes 4 steps to reach all; use period=4 or more"):
        LSGD(period=3, overlap=True).check(5)
    with pytest.raises(ConfigError, match="pull=-1"):
        LGD(pull=-1.0)
