# SPDX-License-Identifier: Apache-2.0
"""The decentralised momentum methods: oracles of their forms, learning rates of zero, bytes, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach
from tests.oracles import common
from tests.oracles.common import Descent, Mixing
from tests.oracles.machines import ExactDiffusion as EDM
from tests.oracles.machines import Machine, Momentum, decentlam, double_averaging, path, quasi_global
from tests.problems import Breathing, Irregular, distance, quadratic, together, watched
from tests.rules import for_each
from thinwire import Complete, ConfigError, Hypercube, OnePeerExponential, Replica, Ring
from thinwire.methods.strategies import Strategy
from thinwire.methods.strategies.gossip.decentlam import DecentLaM
from thinwire.methods.strategies.gossip.double_averaging import DoubleAveraging
from thinwire.methods.strategies.gossip.exact_diffusion import ExactDiffusion
from thinwire.methods.strategies.gossip.quasi_global import QuasiGlobal
from thinwire.planning.plan import explain

DOUBLE = torch.float64
OWN = (DecentLaM, QuasiGlobal, DoubleAveraging, ExactDiffusion)
RATES = [0.1] * 6 + [0.03] * 9


def ring(n: int) -> Mixing:
    return common.ring(n, DOUBLE)


FORMS: list[tuple[Strategy, Callable[[], Machine]]] = [
    (DecentLaM(), lambda: Momentum(ring(3), decentlam, momentum=0.9)),
    (DecentLaM(nesterov=True), lambda: Momentum(ring(3), decentlam, momentum=0.9, nesterov=True)),
    (DecentLaM(Breathing(), 0.5), lambda: Momentum(common.breathing(3, DOUBLE), decentlam, momentum=0.5)),
    (QuasiGlobal(Ring(), nesterov=True), lambda: Momentum(ring(3), quasi_global, momentum=0.9, nesterov=True)),
    (QuasiGlobal(Ring(), 0.8, memory=0.3), lambda: Momentum(ring(3), quasi_global, momentum=0.8, memory=0.3)),
    (
        DoubleAveraging(OnePeerExponential(), 0.8),
        lambda: Momentum(common.one_peer(3, DOUBLE), double_averaging, momentum=0.8),
    ),
    (ExactDiffusion(Complete(), 0.0), lambda: EDM(common.complete(3, DOUBLE), 0.0)),
    (ExactDiffusion(OnePeerExponential(), 0.5), lambda: EDM(common.one_peer(3, DOUBLE), 0.5)),
]


@pytest.mark.parametrize(("strategy", "machine"), FORMS, ids=[str(strategy) for strategy, _ in FORMS])
def test_forms_that_the_battery_does_not_have_equal_their_oracle(
    strategy: Strategy, machine: Callable[[], Machine]
) -> None:
    problem = quadratic(3, DOUBLE)
    expected = path(machine(), problem.gradient, problem.start.expand(3, -1), Descent(RATES), RATES)[-1]
    assert distance(together(3, strategy, problem, RATES), expected) < 1e-11


@pytest.mark.parametrize("strategy", [DecentLaM(), QuasiGlobal(Ring()), DoubleAveraging(), ExactDiffusion()], ids=str)
def test_at_a_learning_rate_of_zero_parameters_are_mixed_and_momentum_decays(strategy: Strategy) -> None:
    rates = [0.1] * 5 + [0.0] + [0.1] * 5

    def see(r: Replica) -> Tensor:
        return torch.cat([r.x, r.state["momentum"]])

    x, momentum = watched(4, strategy, quadratic(4, DOUBLE), rates, see).chunk(2, dim=-1)
    mix = ring(4)(0)
    assert x.isfinite().all()
    assert torch.allclose(x[5].mean(0), x[4].mean(0), rtol=0, atol=1e-14)
    assert distance(momentum[5].mean(0), 0.9 * momentum[4].mean(0)) < 1e-12
    if not isinstance(strategy, ExactDiffusion):
        assert torch.allclose(x[5], mix @ x[4], rtol=0, atol=1e-14)
    assert distance(x[10], x[5]) > 1e-3


@pytest.mark.parametrize("strategy", [DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()], ids=str)
def test_parameters_that_never_have_a_learning_rate_stay_where_they_are(strategy: Strategy) -> None:
    real = together(3, strategy, quadratic(3, DOUBLE), [0.1] * 6, factors=(1.0, 0.0))
    assert torch.allclose(real[:, 1:], torch.ones(3, 2, dtype=DOUBLE), rtol=0, atol=1e-14)
    assert distance(real[:, :1], torch.ones(3, 1, dtype=DOUBLE)) > 1e-2


def test_they_send_what_gossip_sends_and_double_averaging_twice_that() -> None:
    for graph, edges in ((Ring(), 2), (OnePeerExponential(), 1), (Complete(), 4)):
        methods = DecentLaM(graph, 0.3), QuasiGlobal(graph), ExactDiffusion(graph), DoubleAveraging(graph)
        sent = [explain(each, parameters=1000, workers=5).sent_bytes_per_step for each in methods]
        assert sent == [4000 * edges] * 3 + [8000 * edges]


@for_each([DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()])
def test_a_second_momentum_is_refused(strategy: Strategy) -> None:
    name = type(strategy).__name__
    weights = [torch.nn.Parameter(torch.zeros(2))]
    refused: list[tuple[torch.optim.Optimizer, str]] = [
        (
            torch.optim.SGD(weights, lr=0.1, momentum=0.9),
            r"SGD\(momentum=0.9\) under NAME.*Give the optimizer momentum=0",
        ),
        (torch.optim.RMSprop(weights, momentum=0.5), r"RMSprop\(momentum=0.5\) under NAME"),
        (torch.optim.Adam(weights), r"Adam\(betas\[0\]=0.9\) under NAME.*betas=\(0.0, ...\).*or use Gossip"),
        (torch.optim.AdamW(weights), r"AdamW\(betas\[0\]=0.9\) under NAME"),
    ]
    for optimizer, words in refused:
        with pytest.raises(ConfigError, match=words.replace("NAME", name)):
            strategy.check(4, optimizer)
    groups = [{"params": weights}, {"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": 0.7}]
    with pytest.raises(ConfigError, match=r"momentum=0.7"):
        strategy.check(4, torch.optim.SGD(groups, lr=0.1))
    for fine in (torch.optim.SGD(weights, lr=0.1), torch.optim.Adagrad(weights), torch.optim.RMSprop(weights)):
        strategy.check(4, fine)
    with pytest.raises(ConfigError, match=f"its own momentum.*{name}|{name}.*its own momentum"):
        thinwire.run_threads(2, lambda c: attach(c, strategy))


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_a_momentum_out_of_range_is_refused(kind: Callable[..., Strategy], momentum: float) -> None:
    with pytest.raises(ConfigError, match=r"momentum=.*must lie in \[0, 1\)"):
        kind(momentum=momentum)


def test_values_of_the_wrong_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="momentum must be a number"):
        DecentLaM(momentum="0.9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="topology must be a Topology"):
        QuasiGlobal(topology=Ring)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"memory=1.0: must lie in \[0, 1\)"):
        QuasiGlobal(memory=1.0)


@for_each(OWN)
def test_graphs_that_move_the_average_or_do_not_exist_are_refused(kind: Callable[..., Strategy]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*4 workers.*not doubly stochastic.*PushSum"):
        kind(Irregular()).check(4)
    with pytest.raises(ConfigError, match=r"Hypercube\(\) with 3 workers"):
        kind(Hypercube()).check(3)
