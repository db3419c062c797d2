# SPDX-License-Identifier: Apache-2.0
"""The decentralised momentum methods in use: resuming, bytes, which optimizers and graphs they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import thinwire
from tests.engine import attach, batches, steps
from tests.problems import Irregular, Regression, flat, train
from thinwire import Comm, Complete, ConfigError, Gossip, Hypercube, OnePeerExponential, Ring
from thinwire.methods.strategies import Strategy
from thinwire.methods.strategies.gossip.decentlam import DecentLaM
from thinwire.methods.strategies.gossip.double_averaging import DoubleAveraging
from thinwire.methods.strategies.gossip.exact_diffusion import ExactDiffusion
from thinwire.methods.strategies.gossip.quasi_global import QuasiGlobal

OWN = (DecentLaM, QuasiGlobal, DoubleAveraging, ExactDiffusion)


@pytest.mark.parametrize("kind", OWN)
def test_resuming_is_the_uninterrupted_run(kind: Callable[[], Strategy]) -> None:
    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.01)

    def work(comm: Comm) -> tuple[Tensor, Tensor]:
        first = steps(attach(comm, kind(), optimizer=plain), batches(comm.rank, 5))
        kept = copy.deepcopy(first.state_dict(model=True, optimizer=True))
        steps(first, batches(comm.rank, 4, 5))
        second = attach(comm, kind(), optimizer=plain)
        second.load_state_dict(kept)
        steps(second, batches(comm.rank, 4, 5))
        return flat(first.model), flat(second.model)

    for first, second in thinwire.run_threads(3, work):
        assert torch.equal(first, second)


def sent(strategy: Strategy, n: int = 5) -> float:
    problem = Regression(n, 6, torch.float32)
    return thinwire.run_threads(
        n, lambda c: train(c, strategy, problem, [0.1] * 6).comm.meter.by_operation["send_recv"]
    )[0]


def test_they_send_what_gossip_sends_and_double_averaging_twice_that() -> None:
    vector = 34 * 4 * 6
    for graph, edges in ((Ring(), 2), (OnePeerExponential(), 1), (Complete(), 4)):
        assert sent(DecentLaM(graph, 0.3)) == edges * vector
        assert sent(QuasiGlobal(graph)) == edges * vector
        assert sent(ExactDiffusion(graph)) == edges * vector
        assert sent(DoubleAveraging(graph)) == 2 * edges * vector


def test_the_planner_counts_the_same_bytes_without_a_run() -> None:
    from thinwire.planning.plan import explain

    cards = {s: explain(s, parameters=1000, workers=8) for s in (Gossip(order="after"), DecentLaM(), DoubleAveraging())}
    single, lam, double = (card.sent_bytes_per_step for card in cards.values())
    assert (single, lam, double) == (8000, 8000, 16000)


@pytest.mark.parametrize("strategy", [DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()], ids=str)
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


@pytest.mark.slow
def test_an_adaptive_optimizer_without_momentum_of_its_own_trains() -> None:
    def adaptive(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.003, betas=(0.0, 0.99), weight_decay=0.1)

    def losses(comm: Comm, strategy: Strategy) -> tuple[float, float]:
        worker, data = attach(comm, strategy, optimizer=adaptive), batches(0, 1)
        (x, y), found = data[0], []
        for _ in range(2):
            found.append(float((worker.model(x) - y).detach().square().mean()))
            steps(worker, data * 40)
        return found[0], found[1]

    for strategy in (DecentLaM(), QuasiGlobal(), DoubleAveraging(), ExactDiffusion()):
        for before, after in thinwire.run_threads(3, lambda c, s=strategy: losses(c, s)):
            assert after < 0.7 * before, strategy


@pytest.mark.parametrize("kind", OWN)
def test_parameters_of_sixteen_bits_are_refused(kind: Callable[[], Strategy]) -> None:
    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    model = torch.nn.Linear(2, 2).bfloat16()
    with pytest.raises(ConfigError, match=r"bfloat16.*Keep the parameters in float32"):
        attach(None, kind(), model=model, optimizer=plain)


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


@pytest.mark.parametrize("kind", OWN)
def test_graphs_that_move_the_average_or_do_not_exist_are_refused(kind: Callable[..., Strategy]) -> None:
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.*4 workers.*not doubly stochastic.*PushSum"):
        kind(Irregular()).check(4)
    with pytest.raises(ConfigError, match=r"Hypercube\(\) with 3 workers"):
        kind(Hypercube()).check(3)
