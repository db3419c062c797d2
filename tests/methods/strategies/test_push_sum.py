# SPDX-License-Identifier: Apache-2.0
"""Push-sum: sums that no delay and no rounding may change, on any graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, steps
from tests.grids import fast_where
from tests.methods.strategies.async_runs import Lopsided, StepByStep
from tests.oracles import common
from tests.oracles.common import Descent, Mixing
from tests.oracles.machines import Pushed, path
from tests.problems import (
    Irregular,
    Quadratic,
    Regression,
    average_outside,
    distance,
    flat,
    quadratic,
    scattered,
    together,
    train,
    watched,
)
from tests.rules import for_each, refusals
from thinwire import (
    Comm,
    CommTimeoutError,
    Complete,
    ConfigError,
    Gossip,
    Hypercube,
    OnePeerExponential,
    Periodic,
    PushSum,
    Replica,
    Ring,
    SlowMo,
    Strategy,
    Topology,
)
from thinwire.methods.reduce.compressed_all_reduce import mix_
from thinwire.methods.strategies.push_sum.mass import mass_of, mix_mass_, numerator, quotient, weight
from thinwire.methods.topology import Peers
from thinwire.methods.topology.exact_weights import exact_weights

SINGLE, DOUBLE = torch.float32, torch.float64
GRAPHS: dict[Topology, Callable[[int, torch.dtype], Mixing]] = {
    OnePeerExponential(): common.one_peer,
    Ring(): common.ring,
    Irregular(): common.irregular,
    Periodic(Irregular(), 2): common.periodic(common.irregular, 2),
}
SETTINGS = {
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "decay": {"weight_decay": 0.1},
}


def weight_of(r: Replica) -> Tensor:
    return weight(r.state["mass"])


def in_flight(replicas: list[Replica], strategy: PushSum) -> tuple[Tensor, Tensor]:
    """Sums of the numerators and weights in flight, by the graph's own shares."""
    total, weights = torch.zeros(replicas[0].x.numel(), dtype=DOUBLE), torch.zeros((), dtype=DOUBLE)
    for rank, r in enumerate(replicas):
        r.wait_pending()
        for name, work in r.inflight.items():
            peers = exact_weights(strategy.topology, rank, len(replicas), int(name.rpartition(" ")[2]), r.x.dtype)
            for share, message in zip(peers.weights, work.wait(), strict=True):
                total += share * numerator(message)
                weights += share * weight(message)
    return total, weights


# -- against the paper -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", fast_where(lambda each: each in (0, 2), [0, 1, 2, 4]))
@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5)), 4])
def test_overlap_equals_its_oracle_at_any_staleness(staleness: int, graph: Topology, n: int) -> None:
    problem = Regression(n, 14, DOUBLE)
    rates = [0.01] * 7 + [0.02] * 7
    for settings in SETTINGS.values():
        real = together(n, PushSum(graph, staleness), problem, rates, **settings)
        machine = Pushed(GRAPHS[graph](n, DOUBLE), staleness=staleness)
        assert distance(real, expected(machine, problem, n, rates, **settings)) < 1e-12


def expected(
    machine: Pushed,
    problem: Regression | Quadratic,
    n: int,
    rates: list[float],
    *,
    weight_decay: float = 0.0,
    **more: Any,
) -> Tensor:
    descend = Descent(rates, decay=weight_decay, **more)
    return path(machine, problem.gradient, problem.start.expand(n, -1), descend, rates)[-1]


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_ablation_is_the_paper_s_method_without_its_weights(staleness: int) -> None:
    problem = Regression(3, 12, DOUBLE)
    real = together(3, PushSum(Irregular(), staleness, biased=True), problem, [0.1] * 12)
    biased, plain = (
        Pushed(common.irregular(3, DOUBLE), staleness=staleness, biased=biased) for biased in (True, False)
    )
    assert distance(real, expected(biased, problem, 3, [0.1] * 12)) < 1e-12
    assert distance(real, expected(plain, problem, 3, [0.1] * 12)) > 1e-2


# -- what is conserved -------------------------------------------------------------------------------------------------


@for_each([3, 5, 6])
def test_shares_are_exact_and_add_up_to_one_at_every_sender(n: int) -> None:
    for topology in (Ring(), Complete(), OnePeerExponential(), Irregular(), Lopsided()):
        for dtype in (torch.bfloat16, SINGLE, DOUBLE):
            coarse = torch.promote_types(dtype, SINGLE)
            for step in range(topology.period(n)):
                columns = [Fraction(0)] * n
                for rank in range(n):
                    plain = topology.peers(rank, n, step)
                    peers = exact_weights(topology, rank, n, step, dtype)
                    assert (peers.dst, peers.src) == (plain.dst, plain.src)
                    for source, share, about in [
                        (rank, peers.own, plain.own),
                        *zip(peers.src, peers.weights, plain.weights, strict=True),
                    ]:
                        assert float(torch.tensor(share, dtype=coarse)) == share
                        assert share == pytest.approx(about, rel=1e-6)
                        columns[source] += Fraction(share)
                assert columns == [1] * n


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_sums_with_what_is_in_flight_move_by_the_gradients_alone(staleness: int) -> None:
    strategy, n = PushSum(Irregular(), staleness), 5
    problem, run = quadratic(n, DOUBLE), StepByStep(PushSum(Irregular(), staleness), scattered(5))
    before = scattered(n).sum(0)
    for k in range(12):
        z = torch.stack([r.x.clone() for r in run.replicas])
        moves = -0.1 * problem.gradient(z, k)
        step_all(run, moves)
        total, weights = in_flight(run.replicas, strategy)
        now = total + sum(numerator(r.state["mass"]) for r in run.replicas)
        assert torch.allclose(now - before, moves.sum(0), rtol=0, atol=1e-14)
        assert abs(float(sum(weight_of(r) for r in run.replicas) + weights) - n) < 2e-15 * n
        before = now


def step_all(run: StepByStep, moves: Tensor) -> None:
    """One step of every worker; without staleness they wait for each other, which needs threads."""
    if run.strategy.staleness:
        for rank, move in enumerate(moves):
            run.step(rank, move)
        return
    thinwire.run_threads(len(moves), lambda comm: run.step(comm.rank, moves[comm.rank]))


def test_a_weight_travels_in_eight_bytes_behind_numerators_of_any_precision() -> None:
    for dtype, exact, tail in ((torch.bfloat16, SINGLE, 2), (SINGLE, SINGLE, 2), (DOUBLE, DOUBLE, 1)):
        mass = mass_of(torch.arange(1, 4).to(dtype))
        assert (mass.dtype, len(mass)) == (exact, 3 + tail)
        third = Peers((), (0,), 1 / 3, (1 / 3,))
        mix_mass_(mass, [mass.clone()], third)
        assert weight(mass).dtype == DOUBLE
        assert float(weight(mass)) == 2 / 3
        assert torch.allclose(quotient(mass), torch.arange(1, 4).to(exact), rtol=1e-7, atol=0)


def test_a_step_without_an_update_changes_no_bit_of_the_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PushSum, "weightless", lambda self, r: False)
    x = scattered(1, 9, SINGLE)[0]
    r = Replica(x.clone(), torch.empty(0), thinwire.CountingComm(0, 1), lr=lambda: 0.0)
    PushSum().start(r)
    r.state["mass"] = mix_mass_(mass_of(3 * x), [], Peers((), (), 0.3, ()))
    before = r.state["mass"].clone()
    r.step = 1
    PushSum().after_step(r)
    assert torch.equal(r.state["mass"].view(torch.int32), before.view(torch.int32))
    assert torch.equal(r.x, quotient(before))


def test_half_precision_is_mixed_in_single() -> None:
    x = scattered(4, 8, torch.bfloat16)
    run = StepByStep(PushSum(Irregular(), 1), x)
    run.run(300, seed=1)
    for r in run.replicas:
        assert r.x.dtype == torch.bfloat16
        assert torch.allclose(r.x.float(), x.float().mean(0), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_one_peer_weights_stay_exactly_one(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = quadratic(n, DOUBLE)
    without = together(n, PushSum(), problem, [0.1] * 9)
    monkeypatch.setattr(PushSum, "weightless", lambda self, r: False)
    assert (watched(n, PushSum(), problem, [0.1] * 9, weight_of) == 1).all()
    assert distance(together(n, PushSum(), problem, [0.1] * 9), without) < 1e-14


@pytest.mark.parametrize("topology", [OnePeerExponential(), Ring(), Complete()])
def test_on_a_regular_graph_no_weight_is_kept(topology: Topology) -> None:
    workers = thinwire.run_threads(3, lambda c: train(c, PushSum(topology), quadratic(3, DOUBLE), [0.1]))
    assert all(not each.replicas[0].state for each in workers)


# -- which worker waits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_worker_is_ahead_of_its_sources_by_at_most_its_staleness(staleness: int) -> None:
    run = StepByStep(PushSum(Ring(), staleness), scattered(3), timeout=0.02)
    for k in range(staleness):
        assert run.ready(0)
        run.step(0)
        assert len(run.replicas[0].inflight) == k + 1
    assert not run.ready(0)
    with pytest.raises(CommTimeoutError, match=r"rank 0 waited 0\.02 s for a message from rank 1"):
        run.step(0)


# -- consensus and checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [PushSum(staleness=1), PushSum(Irregular(), 3), PushSum(Irregular())], ids=str)
def test_the_consensus_includes_what_is_in_flight_and_changes_nothing(strategy: PushSum) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor, Replica]:
        worker = train(comm, strategy, quadratic(4, DOUBLE), [0.1] * 7)
        (r,) = worker.replicas
        before = [r.x.clone(), r.state["mass"].clone(), torch.tensor(len(r.inflight))]
        with torch.no_grad(), worker.consensus() as model:
            agreed = flat(model)
        now = [r.x, r.state["mass"], torch.tensor(len(r.inflight))]
        assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        own = numerator(r.state["mass"]).clone()
        with torch.no_grad():
            average_outside(strategy, r)
        assert not r.inflight
        assert float(weight_of(r)) == 1
        assert torch.equal(r.x, agreed)
        assert torch.equal(quotient(r.state["mass"]), r.x)
        return own, agreed, r

    own, agreed, _ = zip(*thinwire.run_threads(4, body), strict=True)
    wanted = overlap_total(strategy)
    assert torch.allclose(torch.stack(agreed), wanted.expand(4, -1), rtol=0, atol=1e-14)
    if strategy.staleness:
        assert not torch.allclose(sum(own) / 4, wanted, rtol=0, atol=1e-3)


def overlap_total(strategy: PushSum) -> Tensor:
    """A quarter of all mass after seven steps."""
    machine = Pushed(GRAPHS[strategy.topology](4, DOUBLE), staleness=strategy.staleness)
    return machine.average(expected(machine, quadratic(4, DOUBLE), 4, [0.1] * 7))[0]


def test_the_ablation_s_consensus_is_the_mean_of_what_workers_train_at() -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = train(comm, PushSum(staleness=1, biased=True), quadratic(3, DOUBLE), [0.1] * 5)
        assert not worker.replicas[0].state
        with worker.consensus() as model:
            agreed = flat(model)
        return flat(worker.model), agreed

    own, agreed = (torch.stack(part) for part in zip(*thinwire.run_threads(3, body), strict=True))
    assert torch.allclose(agreed, own.mean(0).expand(3, -1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("strategy", [PushSum(Irregular(), 3), PushSum(staleness=2, biased=True)], ids=str)
def test_a_run_that_was_saved_with_messages_in_flight_goes_on_bitwise(strategy: PushSum) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor, int]:
        whole = steps(attach(comm, strategy), batches(comm.rank, 6))
        state, kept = whole.state_dict(model=True, optimizer=True), len(whole.replicas[0].inflight)
        again = attach(comm, strategy)
        again.load_state_dict(state)
        for worker in (whole, again):
            steps(worker, batches(comm.rank, 7, 6))
            worker.detach()
        return flat(whole.model), flat(again.model), kept

    for whole, resumed, kept in thinwire.run_threads(4, body):
        assert torch.equal(resumed, whole)
        assert kept == strategy.staleness


def test_workers_whose_data_end_early_go_on_taking_part() -> None:
    def body(comm: Comm) -> tuple[Tensor, int, float]:
        worker = attach(comm, PushSum(Irregular(), 2))
        steps(worker, worker.join(batches(comm.rank, 3 + 2 * comm.rank)))
        worker.detach()
        (r,) = worker.replicas
        messages = [(name, work.wait()) for name, work in r.inflight.items()]
        in_flight = sum(
            share * float(weight(message))
            for name, found in messages
            for share, message in zip(shares_at(name, comm.rank), found, strict=True)
        )
        with torch.no_grad(), worker.consensus() as model:
            return flat(model), worker.step, float(weight_of(r)) + in_flight

    agreed, done, weights = zip(*thinwire.run_threads(3, body), strict=True)
    assert all(torch.equal(each, agreed[0]) for each in agreed)
    assert done == (7, 7, 7)
    assert sum(weights) == pytest.approx(3, rel=1e-14)


def shares_at(name: str, rank: int) -> tuple[float, ...]:
    return exact_weights(Irregular(), rank, 3, int(name.rpartition(" ")[2]), SINGLE).weights


# -- bytes and bad input -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hollow(Topology):
    """A ring on which a fifth of every vector is lost."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return Peers(((rank + 1) % size,), ((rank - 1) % size,), 0.4, (0.4,))


@dataclass(frozen=True)
class Pairs(Topology):
    """Pairs of an even rank and the next one, without any other edge."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return Peers((rank ^ 1,), (rank ^ 1,), 0.5, (0.5,))


test_recipes_that_cannot_work_are_refused_with_the_reason = refusals(
    [
        (lambda: PushSum(staleness=-1), r"staleness=-1: must be at least 0"),
        (lambda: PushSum(staleness=0.5), r"staleness must be a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: PushSum(biased=1), r"biased must be True or False"),  # pyright: ignore[reportArgumentType]
        (lambda: PushSum(Hollow(), 1).check(4), r"Hollow\(\).*keeps and sends 0.8 of its vector"),
        (lambda: PushSum(Pairs(), 1).check(4), r"Pairs\(\).*no message travels from rank 0 to rank 2"),
    ]
)


@for_each([Gossip(Hypercube()), PushSum(Hypercube()), SlowMo(PushSum(Hypercube()))])
def test_a_graph_that_does_not_exist_is_refused_before_training(strategy: Strategy) -> None:
    with pytest.raises(ConfigError, match=r"Hypercube\(\) with 3 workers: needs a power of two\. Use 2 or 4"):
        together(3, strategy, quadratic(3, DOUBLE), [0.1])


def test_a_doubly_stochastic_graph_is_mixed_without_weights_and_without_drift() -> None:
    x = torch.ones(3, dtype=SINGLE)
    for _ in range(10_000):
        mix_(x, [x.clone(), x.clone()], exact_weights(Ring(), 0, 3, 0, SINGLE))
    assert torch.equal(x, torch.ones(3))
