# SPDX-License-Identifier: Apache-2.0
"""AD-PSGD and eager Overlap SGP: what holds in every order of steps and messages."""

from __future__ import annotations

import random
import time
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import Mixed, attach, batches, drawn, steps
from tests.grids import fast_where
from tests.methods.strategies.async_runs import CompleteBipartite, end_step, replicas, uneven
from tests.oracles.asynchronous import eager_push_sum, pair_averages
from tests.problems import Irregular, Regression, begin, distance, flat, go_on, quadratic, scattered, train
from tests.rules import for_each, refusals
from thinwire import (
    AsyncLeaderSGD,
    Comm,
    ConfigError,
    Hypercube,
    OnePeerExponential,
    Replica,
    Ring,
    Strategy,
    Streaming,
    Topology,
    run_threads,
)
from thinwire.asynchronous.ad_psgd import ADPSGD
from thinwire.methods.strategies.push_sum.eager_push_sum import EagerPushSum
from thinwire.methods.strategies.push_sum.mass import weight
from thinwire.methods.topology.base import Peers
from thinwire.methods.topology.bipartition import is_active, neighbours, partner
from thinwire.methods.topology.exponential import BipartiteExponential
from thinwire.planning.plan import Link, explain

DOUBLE = torch.float64


def own_gradient(problem: Any, rank: int, x: Tensor) -> Tensor:
    """One worker's gradient of a quadratic."""
    return problem.curvature[rank] * (x - problem.centre[rank])


# -- AD-PSGD -----------------------------------------------------------------------------------------------------------


def own(r: Replica) -> Tensor:
    """A worker's current parameters, an answer in flight included."""
    if "published" in r.state:
        return r.state["published"] + (r.x - r.state["snapshot"])
    answer = r.inflight.get("answer")
    return r.x + (answer.wait()[0] if answer is not None and answer.ready else 0)


@pytest.mark.parametrize("n", fast_where(lambda n: n in (2, 6), [2, 4, 6, 8]))
@pytest.mark.parametrize("seed", range(3))
def test_ad_psgd_equals_its_oracle_in_any_order_of_steps(n: int, seed: int) -> None:
    problem, x, strategy = quadratic(n, DOUBLE), scattered(n), ADPSGD(CompleteBipartite())
    order = list(uneven(n, 30, seed))
    workers = replicas(strategy, x)
    for rank in order:
        end_step(strategy, workers[rank], 0.1 * own_gradient(problem, rank, workers[rank].x))

    def partner_at(rank: int, step: int) -> int:
        return strategy.topology.peers(rank, n, step).dst[0]

    expected = pair_averages(lambda rank, at, step: own_gradient(problem, rank, at), x, 0.1, order, partner_at)
    assert distance(torch.stack([own(r) for r in workers]), expected) < 1e-14


def test_a_passive_worker_is_averaged_in_the_middle_of_its_step() -> None:
    strategy, x = ADPSGD(), torch.tensor([[0.0], [8.0]])
    passive, active = replicas(strategy, x)
    end_step(strategy, passive)
    end_step(strategy, active)
    assert (passive.x.item(), passive.state["published"].item()) == (0, 4)
    assert (active.x.item(), active.inflight["answer"].ready) == (8, True)
    end_step(strategy, active, torch.tensor([1.0]))
    assert (active.x.item(), passive.state["published"].item()) == (3, 3.5)
    end_step(strategy, passive, torch.tensor([2.0]))
    assert (passive.x.item(), passive.state["published"].item()) == (1.5, 1.5)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 4, [2, 4, 6, 8]))
def test_threads_at_uneven_speeds_keep_the_sum_and_do_not_wait_for_each_other(n: int) -> None:
    starts, draw = scattered(n, 20), random.Random(n)
    pauses = [[draw.random() * (0.002 if rank else 0.004) for _ in range(40)] for rank in range(n)]

    def body(comm: Comm) -> tuple[Tensor, Tensor, float]:
        def pause(worker: thinwire.Worker) -> None:
            time.sleep(pauses[comm.rank][worker.step - 1])

        problem = quadratic(n, DOUBLE, width=20)
        worker = train(comm, ADPSGD(CompleteBipartite()), problem, [0.0] * 40, starts=starts, after_step=pause)
        waited = comm.meter.exposed_seconds
        with worker.consensus() as model:
            agreed = flat(model)
        return own(worker.replicas[0]), agreed, waited

    parts = run_threads(n, body, timeout=20)
    total = sum(x for x, _, _ in parts)
    assert torch.allclose(total, starts.sum(0), rtol=0, atol=1e-13)
    for _, agreed, _ in parts:
        assert torch.allclose(agreed, starts.mean(0), rtol=0, atol=1e-13)


def test_an_active_worker_sends_no_request_before_the_last_answer() -> None:
    strategy = ADPSGD()
    passive, active = replicas(strategy, scattered(2))
    for _ in range(5):
        end_step(strategy, active)
    assert active.comm.mailbox(active)._edges[0].sent == 1  # the other has not ended its first step yet
    end_step(strategy, passive)
    for _ in range(3):
        end_step(strategy, active)
    assert active.comm.mailbox(active)._edges[0].sent == 4


def test_a_request_after_a_flush_waits_for_the_next_step() -> None:
    strategy, x = ADPSGD(), torch.tensor([[0.0], [8.0]])
    passive, active = replicas(strategy, x)
    end_step(strategy, passive)
    end_step(strategy, active)
    active.wait_pending()
    end_step(strategy, active)  # uses the last answer, and sends the next request
    passive.wait_pending()
    assert passive.state["published"].item() == 4
    assert not active.inflight["answer"].ready
    end_step(strategy, passive)
    assert active.inflight["answer"].ready
    assert float(own(passive) + own(active)) == 8


def test_a_flush_waits_for_every_neighbour() -> None:
    strategy = ADPSGD(CompleteBipartite())
    workers = replicas(strategy, scattered(4))
    for r in workers:
        end_step(strategy, r)
    workers[1].wait_pending()
    workers[0].comm.timeout = 0.1
    with pytest.raises(thinwire.CommTimeoutError, match=r"for rank 3 to finish this step's exchanges at step 1"):
        workers[0].wait_pending()
    workers[3].wait_pending()
    workers[0].wait_pending()
    workers[2].wait_pending()


@pytest.mark.parametrize(
    "strategy", [ADPSGD(CompleteBipartite()), EagerPushSum(staleness=2), EagerPushSum(Irregular())], ids=str
)
def test_resuming_keeps_everything_that_was_in_flight(strategy: Strategy) -> None:
    problem = Regression(4, 14, DOUBLE)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = train(comm, strategy, problem, [0.1] * 7, momentum=0.9)
        saved = worker.state_dict(model=True, optimizer=True)
        with worker.consensus() as model:
            before = flat(model)
        comm.close_mailbox(worker.replicas[0])
        again = begin(comm, strategy, problem, momentum=0.9)
        again.load_state_dict(saved)
        with again.consensus() as model:
            after = flat(model)
        go_on(again, problem, [0.0] * 3)  # without learning rate nothing moves the mean
        with again.consensus() as model:
            later = flat(model)
        again.detach()
        return before, after, later

    for before, after, later in run_threads(4, body, timeout=20):
        assert torch.equal(before, after)
        assert distance(later, before) < 1e-14


@pytest.mark.parametrize("strategy", [ADPSGD(), EagerPushSum()], ids=str)
def test_a_loop_of_any_user_trains_with_several_dtypes_at_once(strategy: Strategy) -> None:
    def body(comm: Comm) -> tuple[float, float]:
        worker = attach(comm, strategy, model=drawn(Mixed()))
        assert len(worker.replicas) == 2
        data = batches(comm.rank, 12)

        def loss() -> float:
            with worker.consensus() as model, torch.no_grad():
                return sum(float((model(x) - y).square().mean()) for x, y in data)

        steps(worker, data[:1])
        before = loss()
        steps(worker, data * 4)
        return before, loss()

    for before, after in run_threads(2, body, timeout=20):
        assert after < before


# -- bipartite graphs --------------------------------------------------------------------------------------------------


@for_each(product([BipartiteExponential(), Ring(), CompleteBipartite(), Hypercube()], [1, 2, 4, 8, 16, 64]))
def test_every_edge_joins_an_active_and_a_passive_rank(pair: tuple[Topology, int]) -> None:
    topology, n = pair
    ADPSGD(topology).check(n)
    for rank in range(n):
        for other in neighbours(topology, rank, n):
            assert is_active(topology, rank, n) != is_active(topology, other, n)
        if n > 1:
            partners = {partner(topology, rank, n, step) for step in range(2 * topology.period(n))}
            assert partners == set(neighbours(topology, rank, n))


test_graphs_that_are_not_bipartite_are_refused = refusals(
    [
        (
            Ring(),
            5,
            r"Ring\(\) with 5 workers: ranks \d and \d share an edge.*BipartiteExponential\(\) and an even",
        ),
        (Ring(), 9, r"on the same side"),
        (
            OnePeerExponential(),
            8,
            r"OnePeerExponential\(\) with 8 workers: ranks \d and \d share an edge on the same side",
        ),
        (Hypercube(), 6, r"needs a power of two"),
        (BipartiteExponential(), 7, r"needs an even number"),
    ],
    lambda topology, size: ADPSGD(topology).check(size),
)


def test_graphs_that_do_not_connect_are_refused() -> None:
    class Couples(Topology):
        def peers(self, rank: int, size: int, step: int) -> Peers:
            return Peers((rank ^ 1,), (rank ^ 1,), 0.5, (0.5,))

    with pytest.raises(ConfigError, match="with 4 workers: no message travels between ranks 0 and 2"):
        ADPSGD(Couples()).check(4)


def test_types_and_staleness_are_checked() -> None:
    with pytest.raises(ConfigError, match="staleness=-1: must be at least 0"):
        EagerPushSum(staleness=-1)
    for wrong in (lambda: ADPSGD(3), lambda: EagerPushSum(staleness=1.5), lambda: ADPSGD(Ring)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="must be"):
            wrong()


def test_strategies_with_mailboxes_cannot_be_cut_into_fragments() -> None:
    for base in (ADPSGD(), EagerPushSum(), AsyncLeaderSGD()):
        with pytest.raises(ConfigError, match=r"has no period for fragments|no common schedule"):
            Streaming(base, fragments=2)


# -- eager push-sum ----------------------------------------------------------------------------------------------------


def mixing(topology: Topology, n: int) -> Any:
    return lambda k: torch.from_numpy(topology.matrix(n, k))


def run_eager(n: int, strategy: EagerPushSum, rates: list[float], delay: Any, starts: Tensor) -> Any:
    """De-biased rows, weights, and the messages that were waited for, after each step."""
    problem = quadratic(n, starts.dtype)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seen = []

        def record(worker: thinwire.Worker) -> None:
            (r,) = worker.replicas
            metrics = torch.tensor([r.metrics["messages_waited_for"], r.metrics["message_age_steps"]])
            seen.append((r.x.clone(), weight(r.state["mass"]), metrics))

        train(comm, strategy, problem, rates, starts=starts, after_step=record)
        return tuple(torch.stack(part) for part in zip(*seen, strict=True))  # type: ignore[return-value]

    found = run_threads(n, body, delay=delay, timeout=20)
    return tuple(torch.stack(part, dim=1) for part in zip(*found, strict=True))


def random_delay(most: int, least: int = 0) -> Any:
    return lambda src, dst, step: random.Random(f"{src} {dst} {step}").randint(least, most)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 5, [2, 3, 5, 8]))
@pytest.mark.parametrize("topology", [OnePeerExponential(), Irregular()], ids=str)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_eager_push_sum_equals_its_oracle_whatever_the_delays(n: int, topology: Topology, staleness: int) -> None:
    starts, delay, problem = scattered(n), random_delay(5), quadratic(n, DOUBLE)
    found, weights, metrics = run_eager(n, EagerPushSum(topology, staleness), [0.1] * 15, delay, starts)
    z, w, waits = eager_push_sum(
        problem.gradient, starts, 0.1, 15, mixing=mixing(topology, n), staleness=staleness, delay=delay
    )
    assert distance(found, z) < 1e-13
    assert distance(weights, w[..., 0]) < 1e-13
    assert metrics[..., 0].sum(1).tolist() == waits
    if staleness and n > 2:
        assert (weights != 1).any()


def test_messages_that_take_no_time_are_added_in_their_own_step_and_never_waited_for() -> None:
    starts = scattered(4)
    z, weights, metrics = run_eager(4, EagerPushSum(staleness=3), [0.1] * 12, lambda *_: 0, starts)
    synchronous, *_ = run_eager(4, EagerPushSum(staleness=0), [0.1] * 12, None, starts)
    assert torch.equal(z, synchronous)
    assert (weights == 1).all()
    assert not metrics.any()


@pytest.mark.parametrize(
    ("staleness", "delay"),
    fast_where(lambda each: abs(each[1] - each[0]) <= 1 or each == (1, 3), product((0, 1, 2, 4), (0, 1, 2, 3, 5))),
)
def test_a_worker_waits_if_and_only_if_a_message_is_later_than_the_staleness(staleness: int, delay: int) -> None:
    slow_edge = lambda src, dst, step: delay if (src, dst) == (2, 0) else 0  # noqa: E731
    *_, metrics = run_eager(3, EagerPushSum(staleness=staleness), [0.1] * 14, slow_edge, scattered(3))
    assert (metrics[:, 0, 0].sum() > 0) == (delay > staleness)
    assert not metrics[:, 1:, 0].any()
    assert metrics[..., 1].max() == min(delay, staleness)


def test_no_more_messages_are_in_flight_than_the_capacity() -> None:
    strategy = EagerPushSum(staleness=2)
    workers = replicas(strategy, scattered(2))
    workers[0].comm.timeout = 0.1
    for r in workers:
        end_step(strategy, r)
    for _ in range(2):
        end_step(strategy, workers[0])
    with pytest.raises(thinwire.CommTimeoutError, match="a message from rank 1 at step 3"):
        end_step(strategy, workers[0])
    assert len(workers[1].comm.mailbox(workers[1])._edges[0].inbox) <= 4


# -- costs -------------------------------------------------------------------------------------------------------------


def test_a_card_of_ad_psgd_has_one_vector_a_step_in_either_direction() -> None:
    card = explain(ADPSGD(), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == card.received_bytes_per_step == 4000
    assert card.links == (Link(1, 2000.0), Link(3, 2000.0))
    assert card.memory_bytes_per_parameter["published"] == card.memory_bytes_per_parameter["snapshot"] == 4


def test_messages_cost_what_the_card_says() -> None:
    problem = Regression(4, 12, torch.float32)

    def sent(comm: Comm, strategy: Strategy, count: int) -> float:
        train(comm, strategy, problem, [0.1] * count)
        return comm.meter.by_operation.get("send_recv", 0.0)

    assert run_threads(4, lambda comm: sent(comm, EagerPushSum(), 10)) == [10 * (34 * 4 + 8)] * 4
    requests = run_threads(4, lambda comm: sent(comm, ADPSGD(), 10))
    flushed = 8 * 2
    assert all(34 * 4 * 1 + flushed <= nbytes <= 34 * 4 * 10 + flushed for nbytes in requests[1::2])
    assert sum(requests[::2]) == pytest.approx(sum(requests[1::2]) - 2 * flushed)
