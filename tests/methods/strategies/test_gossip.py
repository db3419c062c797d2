# SPDX-License-Identifier: Apache-2.0
"""Push-sum and gossip: sums that are conserved, exact averages, consensus, and graphs that are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.grids import fast_where
from tests.problems import Irregular, Regression, distance, flat, quadratic, scattered, together, train, watched
from thinwire import (
    AllReduce,
    Comm,
    Complete,
    ConfigError,
    Gossip,
    Hypercube,
    LocalSGD,
    OnePeerExponential,
    PushSum,
    Replica,
    Ring,
    SlowMo,
    Strategy,
    Topology,
)
from thinwire.methods.topology.base import doubly_stochastic

DOUBLE = torch.float64


def mass(r: Replica) -> Tensor:
    """Push-sum's numerators and, last, the weight."""
    return r.state["mass"]


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_push_sum_conserves_the_sums_of_parameters_and_of_weights(n: int) -> None:
    starts = scattered(n)
    seen = watched(n, PushSum(Irregular()), quadratic(n, DOUBLE), [0.0] * 20, mass, starts=starts)
    assert torch.allclose(seen[..., :-1].sum(1), starts.sum(0), rtol=0, atol=2e-15 * n)
    assert torch.allclose(seen[..., -1].sum(1), torch.tensor(float(n), dtype=DOUBLE), rtol=0, atol=2e-15 * n)
    assert (seen[..., -1] != 1).any()


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_one_peer_weights_stay_exactly_one(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = quadratic(n, DOUBLE)
    without = together(n, PushSum(), problem, [0.1] * 9)
    monkeypatch.setattr(PushSum, "_weightless", lambda self, r: False)
    weights = watched(n, PushSum(), problem, [0.1] * 9, lambda r: mass(r)[-1])
    assert (weights == 1).all()
    assert distance(together(n, PushSum(), problem, [0.1] * 9), without) < 1e-14


@pytest.mark.parametrize("topology", [OnePeerExponential(), Ring(), Complete()])
def test_on_a_regular_graph_no_weight_is_kept(topology: Topology) -> None:
    worker = thinwire.run_threads(3, lambda c: train(c, PushSum(topology), quadratic(3, DOUBLE), [0.1]))
    assert all(not a.replicas[0].state for a in worker)


@pytest.mark.parametrize("n", fast_where(lambda n: n == 8, [1, 2, 4, 8, 16]))
@pytest.mark.parametrize("topology", [OnePeerExponential(), Hypercube()])
@pytest.mark.parametrize("order", ["push", "after"])
def test_powers_of_two_agree_exactly_after_log2_n_steps(n: int, topology: Topology, order: str) -> None:
    strategy = PushSum(topology) if order == "push" else Gossip(topology, "after")
    starts = scattered(n)
    seen = together(n, strategy, quadratic(n, DOUBLE), [0.0] * (n.bit_length() - 1), starts=starts)
    assert torch.allclose(seen, starts.mean(0).expand(n, -1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("settings", [{"momentum": 0.9, "nesterov": True}, {"momentum": 0.5, "weight_decay": 0.1}])
@pytest.mark.parametrize("strategy", [PushSum(Complete()), Gossip(Complete(), "after"), LocalSGD(1)])
def test_the_complete_graph_is_all_reduce_after_every_step(strategy: Strategy, settings: dict[str, float]) -> None:
    problem = Regression(3, 12, DOUBLE)
    seen = watched(3, strategy, problem, [0.1] * 12, **settings)
    assert distance(seen, watched(3, AllReduce(), problem, [0.1] * 12, **settings)) < 1e-14


def spread(z: Tensor) -> float:
    return float((z - z.mean(0)).abs().max())


def test_the_consensus_of_push_sum_is_mass_over_weight() -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        worker = train(comm, PushSum(Irregular()), quadratic(3, DOUBLE), [0.1] * 5)
        (r,) = worker.replicas
        own = r.x.clone()
        with torch.no_grad(), worker.consensus() as model:
            agreed = flat(model)
        assert torch.equal(r.x, own)
        return mass(r).clone(), agreed, own

    masses, agreed, own = (torch.stack(part) for part in zip(*thinwire.run_threads(3, body), strict=True))
    total = masses.sum(0)
    assert torch.allclose(agreed, (total[:-1] / total[-1]).expand(3, -1), rtol=0, atol=1e-14)
    assert spread(own) > 1e-3


@pytest.mark.parametrize("order", ["while", "after"])
def test_the_consensus_of_gossip_is_the_plain_mean(order: str) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor]:
        worker = train(comm, Gossip(order=order), quadratic(4, DOUBLE), [0.1] * 5)
        with worker.consensus() as model:
            agreed = flat(model)
        return flat(worker.model), agreed

    own, agreed = (torch.stack(part) for part in zip(*thinwire.run_threads(4, body), strict=True))
    assert torch.allclose(agreed, own.mean(0).expand(4, -1), rtol=0, atol=1e-15)


def test_gossip_refuses_a_graph_that_would_move_the_average() -> None:
    assert not doubly_stochastic(Irregular(), 4)
    with pytest.raises(ConfigError, match=r"Gossip.*4 workers.*not doubly stochastic.*PushSum"):
        Gossip(Irregular()).check(4)
    PushSum(Irregular()).check(4)


def test_a_graph_that_does_not_exist_is_refused_before_training() -> None:
    for strategy in (Gossip(Hypercube()), PushSum(Hypercube()), SlowMo(PushSum(Hypercube()))):
        with pytest.raises(ConfigError, match=r"Hypercube\(\) with 3 workers: needs a power of two\. Use 2 or 4"):
            together(3, strategy, quadratic(3, DOUBLE), [0.1])
