"""AD-PSGD and eager Overlap SGP: what holds however steps and messages interleave."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, steps
from tests.oracles.asynchronous import TwoSides, eager_push_sum, end_step, pair_averages, replicas, uneven
from tests.problems import Irregular, Regression, distance, flat, quadratic, train
from thinwire import (
    Comm,
    ConfigError,
    Hypercube,
    OnePeerExponential,
    PeerLostError,
    Replica,
    Ring,
    SlowMo,
    Strategy,
    Topology,
    run_threads,
)
from thinwire.plan import Link, explain
from thinwire.strategies.gossip.ad_psgd import ADPSGD
from thinwire.strategies.push_sum.eager_push_sum import EagerPushSum
from thinwire.strategies.push_sum.mass import mix_mass_, numerator, weight
from thinwire.strategies.push_sum.push_sum import PushSum
from thinwire.topology.base import Peers
from thinwire.topology.bipartition import asks, neighbours, partner
from thinwire.topology.exponential import BipartiteExponential

DOUBLE = torch.float64


def scattered(n: int, width: int = 3, dtype: torch.dtype = DOUBLE) -> Tensor:
    """Different parameters for each of n workers."""
    return torch.randn(n, width, generator=torch.Generator().manual_seed(n), dtype=DOUBLE).to(dtype)


def alone(problem: Any, rank: int, x: Tensor) -> Tensor:
    """One worker's gradient of a quadratic."""
    return problem.curvature[rank] * (x - problem.centre[rank])


# -- AD-PSGD -----------------------------------------------------------------------------------------------------------


def own(r: Replica) -> Tensor:
    """What a worker's parameters have become, an answer on its way to it included."""
    if "published" in r.state:
        return r.state["published"] + (r.x - r.state["snapshot"])
    answer = r.inflight.get("answer")
    return r.x + (answer.wait()[0] if answer is not None and answer.ready else 0)


@pytest.mark.parametrize("n", [2, 4, 6, 8])
@pytest.mark.parametrize("seed", range(3))
def test_ad_psgd_equals_its_oracle_in_any_order_of_steps(n: int, seed: int) -> None:
    problem, x, strategy = quadratic(n, DOUBLE), scattered(n), ADPSGD(TwoSides())
    order = list(uneven(n, 30, seed))
    workers = replicas(strategy, x)
    for rank in order:
        end_step(strategy, workers[rank], 0.1 * alone(problem, rank, workers[rank].x))
    expected = pair_averages(lambda rank, at, step: alone(problem, rank, at), x, 0.1, order, TwoSides())
    assert distance(torch.stack([own(r) for r in workers]), expected) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_sum_of_parameters_is_conserved_in_any_order_of_steps(dtype: torch.dtype) -> None:
    x, strategy = scattered(6, 50, dtype), ADPSGD(TwoSides())
    workers = replicas(strategy, x)
    for rank in uneven(6, 500, 1, slow=[1, 1, 1, 0.1, 5, 1]):
        end_step(strategy, workers[rank])
    total = torch.stack([own(r) for r in workers]).double().sum(0)
    assert torch.allclose(total, x.double().sum(0), rtol=0, atol=500 * torch.finfo(dtype).eps)
    assert (torch.stack([own(r) for r in workers]) - x.mean(0)).abs().max() < 0.1


def test_a_worker_that_answers_is_averaged_in_the_middle_of_its_step() -> None:
    strategy, x = ADPSGD(), torch.tensor([[0.0], [8.0]])
    answering, asking = replicas(strategy, x)
    end_step(strategy, answering)
    end_step(strategy, asking)
    assert (answering.x.item(), answering.state["published"].item()) == (0, 4)
    assert (asking.x.item(), asking.inflight["answer"].ready) == (8, True)
    end_step(strategy, asking, torch.tensor([1.0]))
    assert (asking.x.item(), answering.state["published"].item()) == (3, 3.5)
    end_step(strategy, answering, torch.tensor([2.0]))
    assert (answering.x.item(), answering.state["published"].item()) == (1.5, 1.5)


@pytest.mark.parametrize("n", [2, 4, 6, 8])
def test_threads_at_uneven_speeds_keep_the_sum_and_do_not_wait_for_each_other(n: int) -> None:
    starts, draw = scattered(n, 20), random.Random(n)
    pauses = [[draw.random() * (0.002 if rank else 0.004) for _ in range(40)] for rank in range(n)]

    def body(comm: Comm) -> tuple[Tensor, Tensor, float]:
        def rest(worker: thinwire.Worker) -> None:
            time.sleep(pauses[comm.rank][worker.step - 1])

        problem = quadratic(n, DOUBLE, width=20)
        worker = train(comm, ADPSGD(TwoSides()), problem, [0.0] * 40, starts=starts, after_step=rest)
        waited = comm.meter.exposed_seconds
        with worker.consensus() as model:
            agreed = flat(model)
        return own(worker.replicas[0]), agreed, waited

    parts = run_threads(n, body, timeout=20)
    total = sum(x for x, _, _ in parts)
    assert torch.allclose(total, starts.sum(0), rtol=0, atol=1e-13)
    for _, agreed, _ in parts:
        assert torch.allclose(agreed, starts.mean(0), rtol=0, atol=1e-13)


def test_workers_come_together() -> None:
    x, strategy = scattered(8), ADPSGD(Ring())
    workers = replicas(strategy, x)
    for _ in range(60):
        for r in workers:
            end_step(strategy, r)
    assert torch.allclose(torch.stack([own(r) for r in workers]), x.mean(0).expand(8, -1), rtol=0, atol=1e-3)


def test_ad_psgd_settles_where_the_workers_gradients_cancel() -> None:
    problem, strategy = quadratic(4, DOUBLE), ADPSGD(TwoSides())
    workers = replicas(strategy, scattered(4))
    draw = random.Random(0)
    for _ in range(1200):
        for rank in draw.sample(range(4), 4):
            end_step(strategy, workers[rank], 0.01 * alone(problem, rank, workers[rank].x))
    mean = torch.stack([own(r) for r in workers]).mean(0)
    best = (problem.curvature[:, None] * problem.centre).sum(0) / problem.curvature.sum()
    assert (mean - best).abs().max() < 0.03


def test_nobody_asks_again_before_the_answer() -> None:
    strategy = ADPSGD()
    answering, asking = replicas(strategy, scattered(2))
    for _ in range(5):
        end_step(strategy, asking)
    assert asking.comm.mailbox(asking)._edges[0].posted == 1  # the other has not ended its first step yet
    end_step(strategy, answering)
    for _ in range(3):
        end_step(strategy, asking)
    assert asking.comm.mailbox(asking)._edges[0].posted == 4


def test_an_answer_waits_until_everyone_has_stood_still() -> None:
    strategy, x = ADPSGD(), torch.tensor([[0.0], [8.0]])
    answering, asking = replicas(strategy, x)
    end_step(strategy, answering)
    end_step(strategy, asking)
    asking.wait_pending()
    end_step(strategy, asking)  # takes in the answer of before, and asks anew
    answering.wait_pending()
    assert answering.state["published"].item() == 4
    assert not asking.inflight["answer"].ready
    end_step(strategy, answering)
    assert asking.inflight["answer"].ready
    assert float(own(answering) + own(asking)) == 8


def test_settling_waits_for_every_neighbour() -> None:
    strategy = ADPSGD(TwoSides())
    workers = replicas(strategy, scattered(4))
    for r in workers:
        end_step(strategy, r)
    workers[1].wait_pending()
    workers[0].comm.timeout = 0.1
    with pytest.raises(thinwire.CommTimeoutError, match="all neighbours to finish step 1"):
        workers[0].wait_pending()
    workers[3].wait_pending()
    workers[0].wait_pending()
    workers[2].wait_pending()


@pytest.mark.parametrize(
    "strategy", [ADPSGD(TwoSides()), EagerPushSum(staleness=2), EagerPushSum(Irregular())], ids=str
)
def test_resuming_keeps_everything_that_was_under_way(strategy: Strategy) -> None:
    problem = Regression(4, 14, DOUBLE)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = train(comm, strategy, problem, [0.1] * 7, momentum=0.9)
        saved = worker.state_dict()
        with worker.consensus() as model:
            before = flat(model)
        comm.close_mailbox(worker.replicas[0])
        model = problem.model()
        again = thinwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), strategy, comm=comm)
        again.load_state_dict(saved)
        again.optimizer.param_groups[0]["lr"] = 0.0
        with again.consensus() as model:
            after = flat(model)
        for _ in range(3):  # without learning rate nothing moves the mean
            problem.loss(again.model, comm.rank, 0).backward()
            again.optimizer.step()
        with again.consensus() as model:
            later = flat(model)
        again.detach()
        return before, after, later

    for before, after, later in run_threads(4, body, timeout=20):
        assert torch.equal(before, after)
        assert distance(later, before) < 1e-14


@pytest.mark.parametrize("strategy", [ADPSGD(TwoSides()), EagerPushSum(staleness=2)], ids=str)
def test_a_run_goes_on_after_it_has_stood_still(strategy: Strategy) -> None:
    starts = scattered(4)

    def body(comm: Comm) -> list[Tensor]:
        seen = []

        def look(worker: thinwire.Worker) -> None:
            if worker.step % 3 == 0 or worker.step == 4:
                with worker.consensus() as model:
                    seen.append(flat(model))

        train(comm, strategy, quadratic(4, DOUBLE), [0.0] * 9, starts=starts, after_step=look)
        return seen

    for seen in run_threads(4, body, timeout=20):
        assert len(seen) == 4
        for agreed in seen:
            assert torch.allclose(agreed, starts.mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("base", [ADPSGD(TwoSides()), EagerPushSum(staleness=2)], ids=str)
def test_slow_momentum_over_letters_averages_exactly(base: Strategy) -> None:
    problem = Regression(4, 8, DOUBLE)

    def body(comm: Comm) -> list[Tensor]:
        seen = []

        def look(worker: thinwire.Worker) -> None:
            if worker.step % 4 == 0:
                seen.append(flat(worker.model))

        train(comm, SlowMo(base, period=4), problem, [0.1] * 8, after_step=look)
        return seen

    found = run_threads(4, body, timeout=20)
    for seen in found:
        assert all(torch.equal(x, y) for x, y in zip(seen, found[0], strict=True))


@pytest.mark.parametrize("strategy", [ADPSGD(), EagerPushSum()], ids=str)
def test_a_loop_of_any_user_trains_with_several_dtypes_at_once(strategy: Strategy) -> None:
    from tests.engine import Mixed, drawn

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

    model_output = run_threads(2, lambda comm: body(comm), timeout=20)
    for before, after in model_output:
        assert after < before


@pytest.mark.parametrize("strategy", [ADPSGD(), EagerPushSum()], ids=str)
def test_one_worker_alone_trains_as_without_a_strategy(strategy: Strategy) -> None:
    problem = Regression(1, 8, torch.float32)
    found = train(None, strategy, problem, [0.1] * 8, momentum=0.9)
    assert torch.equal(flat(found.model), flat(train(None, thinwire.Local(), problem, [0.1] * 8, momentum=0.9).model))
    assert found.comm.meter.payload_bytes == 0
    with found.consensus() as model:
        assert torch.equal(flat(model), flat(found.model))


# -- two sides ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [BipartiteExponential(), Ring(), TwoSides(), Hypercube()], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 64])
def test_one_side_asks_and_the_other_answers(topology: Topology, n: int) -> None:
    ADPSGD(topology).check(n)
    for rank in range(n):
        for other in neighbours(topology, rank, n):
            assert asks(topology, rank, n) != asks(topology, other, n)
        if n > 1:
            met = {partner(topology, rank, n, step) for step in range(2 * topology.period(n))}
            assert met == set(neighbours(topology, rank, n))


@pytest.mark.parametrize(
    ("topology", "size", "words"),
    [
        (
            Ring(),
            5,
            r"Ring\(\) with 5 workers: ranks \d and \d share an edge.*BipartiteExponential\(\) and an even",
        ),
        (Ring(), 9, r"on the same side"),
        (OnePeerExponential(), 8, r"OnePeerExponential\(\) with 8 workers: ranks \d and \d share an edge on the same"),
        (Hypercube(), 6, r"needs a power of two"),
        (BipartiteExponential(), 7, r"needs an even number"),
    ],
)
def test_graphs_without_two_sides_are_refused(topology: Topology, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ADPSGD(topology).check(size)


def test_graphs_that_do_not_connect_are_refused() -> None:
    class Couples(Topology):
        def peers(self, rank: int, size: int, step: int) -> Peers:
            return Peers((rank ^ 1,), (rank ^ 1,), 0.5, (0.5,))

    with pytest.raises(ConfigError, match="with 4 workers: nothing ever travels between ranks 0 and 2"):
        ADPSGD(Couples()).check(4)


def test_kinds_and_staleness_are_checked() -> None:
    with pytest.raises(ConfigError, match="staleness=-1: must be at least 0 steps"):
        EagerPushSum(staleness=-1)
    for wrong in (lambda: ADPSGD(3), lambda: EagerPushSum(staleness=1.5), lambda: ADPSGD(Ring)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="must be"):
            wrong()


def test_strategies_that_write_letters_cannot_be_cut() -> None:
    r = Replica(torch.zeros(4), torch.empty(0), thinwire.CountingComm(0, 2), lr=lambda: 0.0)
    for strategy in (ADPSGD(), EagerPushSum()):
        with pytest.raises(ConfigError, match="cannot be cut into fragments"):
            strategy.start(r.part("fragment", slice(0, 2)))


# -- eager push-sum ----------------------------------------------------------------------------------------------------


def mixing(topology: Topology, n: int) -> Any:
    return lambda k: torch.from_numpy(topology.matrix(n, k))


def run_eager(n: int, strategy: EagerPushSum, rates: list[float], delay: Any, starts: Tensor) -> Any:
    """De-biased rows, weights, and the messages that were waited for, after each step."""
    problem = quadratic(n, starts.dtype)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seen = []

        def look(worker: thinwire.Worker) -> None:
            (r,) = worker.replicas
            noticed = torch.tensor([r.metrics["messages_waited_for"], r.metrics["message_age_steps"]])
            seen.append((r.x.clone(), weight(r.state["mass"]), noticed))

        train(comm, strategy, problem, rates, starts=starts, after_step=look)
        return tuple(torch.stack(part) for part in zip(*seen, strict=True))  # type: ignore[return-value]

    found = run_threads(n, body, delay=delay, timeout=20)
    return tuple(torch.stack(part, dim=1) for part in zip(*found, strict=True))


def random_delay(most: int, least: int = 0) -> Any:
    return lambda src, dst, step: random.Random(f"{src} {dst} {step}").randint(least, most)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("topology", [OnePeerExponential(), Irregular()], ids=str)
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_eager_push_sum_equals_its_oracle_whatever_the_delays(n: int, topology: Topology, staleness: int) -> None:
    starts, delay, problem = scattered(n), random_delay(5), quadratic(n, DOUBLE)
    found, weights, noticed = run_eager(n, EagerPushSum(topology, staleness), [0.1] * 15, delay, starts)
    z, w, waits = eager_push_sum(
        problem.gradient, starts, 0.1, 15, mixing=mixing(topology, n), staleness=staleness, delay=delay
    )
    assert distance(found, z) < 1e-13
    assert distance(weights, w[..., 0]) < 1e-13
    assert noticed[..., 0].sum(1).tolist() == waits
    if staleness and n > 2:
        assert (weights != 1).any()


@pytest.mark.parametrize("topology", [OnePeerExponential(), Irregular()], ids=str)
def test_without_staleness_it_is_push_sum(topology: Topology) -> None:
    problem = Regression(5, 12, torch.float32)

    def parameters(strategy: Strategy) -> Tensor:
        bodies = run_threads(5, lambda comm: flat(train(comm, strategy, problem, [0.1] * 12, momentum=0.9).model))
        return torch.stack(bodies)

    assert distance(parameters(EagerPushSum(topology, 0)), parameters(PushSum(topology))) < 1e-6


def test_letters_that_take_no_time_are_absorbed_in_their_own_step_and_never_waited_for() -> None:
    starts = scattered(4)
    z, weights, noticed = run_eager(4, EagerPushSum(staleness=3), [0.1] * 12, lambda *_: 0, starts)
    synchronous, *_ = run_eager(4, EagerPushSum(staleness=0), [0.1] * 12, None, starts)
    assert torch.equal(z, synchronous)
    assert (weights == 1).all()
    assert not noticed.any()


@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize("delay", [0, 1, 2, 3, 5])
def test_a_worker_waits_if_and_only_if_a_letter_is_later_than_the_staleness(staleness: int, delay: int) -> None:
    slow_edge = lambda src, dst, step: delay if (src, dst) == (2, 0) else 0  # noqa: E731
    *_, noticed = run_eager(3, EagerPushSum(staleness=staleness), [0.1] * 14, slow_edge, scattered(3))
    assert (noticed[:, 0, 0].sum() > 0) == (delay > staleness)
    assert not noticed[:, 1:, 0].any()
    assert noticed[..., 1].max() == min(delay, staleness)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_ledger_of_mass_holds_for_ten_thousand_steps_of_random_delays(dtype: torch.dtype) -> None:
    n, count = 3, 10_000 if dtype is DOUBLE else 1_000
    strategy, x = EagerPushSum(staleness=3), scattered(n, 4, dtype)
    delays = torch.randint(1, 6, (count, n, n), generator=torch.Generator().manual_seed(0)).tolist()
    workers = replicas(strategy, x, delay=lambda src, dst, step: delays[step][src][dst])

    def total() -> tuple[Tensor, float]:
        numerators, weights = torch.zeros(4, dtype=DOUBLE), 0.0
        for r in workers:
            mass = r.state["mass"].clone()
            for name, _, share in strategy._under_way(r):
                box = r.comm.mailbox(r)
                step, rank = (int(word) for word in name.split() if word.isdigit())
                (found,) = (each for each in box._edges[rank].inbox.values() if each.step == step)
                mix_mass_(mass, [found.content], Peers((), (), 1.0, (share,)))
            numerators += numerator(mass).double()
            weights += float(weight(mass))
        return numerators, weights

    spread = 0.0
    for step in range(count):
        for r in workers:
            end_step(strategy, r)
        spread = max(spread, *(abs(float(weight(r.state["mass"])) - 1) for r in workers))
        if step % 500 == 499:
            numerators, weights = total()
            assert abs(weights / n - 1) < 1e-12
            tolerance = 1e-12 if dtype is DOUBLE else 1e-5
            assert torch.allclose(numerators, x.double().sum(0), rtol=0, atol=tolerance * float(x.abs().sum()))
    assert spread > 0.2


def test_no_more_letters_are_under_way_than_there_is_room_for() -> None:
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


def test_a_card_of_eager_push_sum_adds_the_weight_to_every_letter() -> None:
    card = explain(EagerPushSum(), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == card.received_bytes_per_step == 4008
    assert card.links == (Link(1, 2004.0), Link(2, 2004.0))
    assert card.collective_bytes_per_step == 0


def test_a_card_of_ad_psgd_has_one_vector_a_step_in_either_direction() -> None:
    card = explain(ADPSGD(), parameters=1000, workers=4)
    assert card.sent_bytes_per_step == card.received_bytes_per_step == 4000
    assert card.links == (Link(1, 2000.0), Link(3, 2000.0))
    assert card.memory_bytes_per_parameter["published"] == card.memory_bytes_per_parameter["snapshot"] == 4


def test_letters_cost_what_the_card_says() -> None:
    problem = Regression(4, 12, torch.float32)

    def sent(comm: Comm, strategy: Strategy, count: int) -> float:
        train(comm, strategy, problem, [0.1] * count)
        return comm.meter.by_operation.get("send_recv", 0.0)

    assert run_threads(4, lambda comm: sent(comm, EagerPushSum(), 10)) == [10 * (34 * 4 + 8)] * 4
    asked = run_threads(4, lambda comm: sent(comm, ADPSGD(), 10))
    flushed = 8 * 2
    assert all(34 * 4 * 1 + flushed <= nbytes <= 34 * 4 * 10 + flushed for nbytes in asked[1::2])
    assert sum(asked[::2]) == pytest.approx(sum(asked[1::2]) - 2 * flushed)


def test_a_lost_worker_is_named_by_those_who_hear_of_it() -> None:
    ends: dict[int, str] = {}

    def body(comm: Comm) -> None:
        def fail(worker: thinwire.Worker) -> None:
            if comm.rank == 0 and worker.step == 5:
                raise ZeroDivisionError("on purpose")
            time.sleep(0.001)

        try:
            train(comm, ADPSGD(), quadratic(2, DOUBLE), [0.1] * 300, after_step=fail)
        except PeerLostError as error:
            ends[comm.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError):
        run_threads(2, body, timeout=20)
    assert "rank 0 was lost" in ends[1]
