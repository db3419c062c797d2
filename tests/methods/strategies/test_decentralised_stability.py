# SPDX-License-Identifier: Apache-2.0
"""Graphs that the certificate refuses diverge, those that it accepts converge, and it agrees with closed forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import thinwire
from tests.oracles import machines
from tests.oracles.common import Descent, Mixing
from tests.oracles.machines import Machine, Momentum, path
from tests.problems import Quadratic, quadratic, together
from thinwire import (
    Complete,
    ConfigError,
    DecentLaM,
    DirectedExponential,
    DoubleAveraging,
    ExactDiffusion,
    Gossip,
    Hypercube,
    OnePeerExponential,
    QuasiGlobal,
    RandomMatching,
    Ring,
    Topology,
)
from thinwire.methods.topology import Peers
from thinwire.methods.topology.certificate import (
    Disagreement,
    decentlam,
    exact_diffusion,
    growth,
    largest_stable_momentum,
    quasi_global,
)

DOUBLE = torch.float64


Method = Callable[[Mixing], Machine]


def of(rule: Callable[..., Any], **settings: Any) -> Method:
    return lambda mixing: Momentum(mixing, rule, **settings)


def diffusion(mixing: Mixing) -> Machine:
    return machines.ExactDiffusion(mixing, 0.9)


@dataclass(frozen=True)
class Eager(Topology):
    """A symmetric ring on which workers keep little of their own."""

    own: float = 0.1

    def peers(self, rank: int, size: int, step: int) -> Peers:
        neighbours = tuple(sorted({(rank - 1) % size, (rank + 1) % size}))
        return Peers(neighbours, neighbours, self.own, ((1 - self.own) / len(neighbours),) * len(neighbours))


def mixing(topology: Topology, n: int) -> Mixing:
    """The graph as the oracles take it."""
    matrices = [torch.from_numpy(topology.matrix(n, step)) for step in range(topology.period(n))]
    return lambda k: matrices[k % len(matrices)]


def spread_after(method: Method, topology: Topology, n: int, steps: int, rate: float = 0.01) -> float:
    """How far workers are apart, relative to their start, after steps on a flat quadratic."""
    bowl = Quadratic(torch.ones(n, dtype=DOUBLE), torch.zeros(n, 3, dtype=DOUBLE))
    start = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=DOUBLE)
    rates = [rate] * steps
    end = path(method(mixing(topology, n)), bowl.gradient, start, Descent(rates), rates)[-1]
    return float((end - end.mean(0)).norm() / (start - start.mean(0)).norm())


# -- closed forms ------------------------------------------------------------------------------------------------------


def radius(method: Disagreement, mode: complex) -> float:
    return float(np.abs(np.linalg.eigvals(np.array(method.mixed) * mode + np.array(method.kept))).max())


def test_each_mode_has_the_roots_of_its_polynomial() -> None:
    draw = np.random.default_rng(0)
    for _ in range(50):
        beta, mode = draw.uniform(0, 0.99), draw.uniform(-1, 1) + 1j * draw.uniform(-1, 1)
        polynomials = {
            decentlam(beta): [1, -(mode + beta), beta],
            decentlam(beta, nesterov=True): [1, -(1 + beta) * mode, beta * mode],
            exact_diffusion(): [1, -(1 + mode), (1 + mode) / 2],
        }
        for method, coefficients in polynomials.items():
            assert np.isclose(radius(method, mode), np.abs(np.roots(coefficients)).max(), rtol=1e-7)


def test_a_graph_that_agrees_faster_than_momentum_decays_is_slowed_down_to_its_root() -> None:
    for n in (4, 5, 8):
        assert abs(growth(Complete(), n, decentlam(0.9)) - 0.9**0.5) < 1e-7
        assert abs(growth(Ring(), n, decentlam(0.9)) - 0.9**0.5) < 1e-7
        assert growth(Complete(), n, decentlam(0.0)) < 1e-7


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_one_worker_and_few_workers_are_always_stable(n: int) -> None:
    assert growth(Ring(), 1, decentlam(0.9)) == 0
    for strategy in (DecentLaM(), DecentLaM(nesterov=True), QuasiGlobal(), ExactDiffusion(), DoubleAveraging()):
        strategy.check(n)


def test_a_constant_graph_and_the_same_graph_as_a_changing_one_grow_alike() -> None:
    @dataclass(frozen=True)
    class Twice(Topology):
        """The directed graph, with a period of two steps that only almost agree."""

        def peers(self, rank: int, size: int, step: int) -> Peers:
            peers = DirectedExponential().peers(rank, size, step)
            return peers._replace(own=peers.own + 1e-15 * (step % 2))

        def period(self, size: int) -> int:
            return 2

    for method in (decentlam(0.5), decentlam(0.9), quasi_global(0.9, memory=0.9), exact_diffusion()):
        assert abs(growth(DirectedExponential(), 8, method) - growth(Twice(), 8, method)) < 1e-7


# -- refused and accepted ----------------------------------------------------------------------------------------------

CHANGING: list[tuple[Topology, int]] = [
    (OnePeerExponential(), 8),
    (OnePeerExponential(), 5),
    (Hypercube(), 16),
    (RandomMatching(seed=2, draws=24), 8),
    (DirectedExponential(), 8),
    (DirectedExponential(), 5),
]


@pytest.mark.parametrize(("graph", "n"), CHANGING, ids=str)
def test_decentlam_converges_below_the_bound_in_the_error_and_diverges_above(graph: Topology, n: int) -> None:
    with pytest.raises(ConfigError, match=rf"DecentLaM.*with {n} workers: differences between workers") as refused:
        DecentLaM(graph).check(n)
    bound_in_error = re.search(r"[lL]ower the momentum to (\d\.\d\d) or less", str(refused.value))
    assert bound_in_error
    bound = float(bound_in_error[1])
    assert 0.4 < bound < 0.8
    DecentLaM(graph, bound).check(n)
    with pytest.raises(ConfigError, match="would grow"):
        DecentLaM(graph, bound + 0.02).check(n)
    below, above = (of(machines.decentlam, momentum=bound + off) for off in (-0.03, 0.06))
    assert spread_after(below, graph, n, 600) < 1e-3
    assert spread_after(above, graph, n, 600) > 1e3


@pytest.mark.parametrize(("graph", "n"), CHANGING, ids=str)
def test_the_growth_that_is_certified_is_the_growth_that_happens(graph: Topology, n: int) -> None:
    period = graph.period(n)
    for certified, method in (
        (decentlam(0.9), of(machines.decentlam, momentum=0.9)),
        (decentlam(0.95, nesterov=True), of(machines.decentlam, momentum=0.95, nesterov=True)),
    ):
        factor = growth(graph, n, certified)
        first, second = (spread_after(method, graph, n, steps, 1e-9) for steps in (10 * period, 30 * period))
        if factor > 1.01:
            assert abs((second / first) ** (1 / (20 * period)) / factor - 1) < 0.02
        else:
            assert second < 2 * first


@pytest.mark.parametrize(("graph", "n"), [*CHANGING, (OnePeerExponential(), 32), (Ring(), 8)], ids=str)
@pytest.mark.parametrize("momentum", [0.9, 0.95])
def test_quasi_global_and_local_momentum_are_stable_on_every_graph(graph: Topology, n: int, momentum: float) -> None:
    for nesterov in (False, True):
        QuasiGlobal(graph, momentum, nesterov).check(n)
        method = of(machines.quasi_global, momentum=momentum, nesterov=nesterov)
        assert spread_after(method, graph, n, 500) < 0.05

    Gossip(graph).check(n)
    DoubleAveraging(graph, momentum).check(n)
    assert spread_after(of(machines.double_averaging, momentum=momentum), graph, n, 500) < 0.05


def test_exact_diffusion_is_refused_where_its_corrections_diverge() -> None:
    for graph, n in ((OnePeerExponential(), 32), (DirectedExponential(), 16), (Hypercube(), 32)):
        with pytest.raises(ConfigError, match=r"ExactDiffusion.*would grow by 1\.\d+ a step.*QuasiGlobal") as refused:
            ExactDiffusion(graph).check(n)
        assert "lower the momentum" not in str(refused.value)
        assert spread_after(diffusion, graph, n, 800) > 1e3
    for graph, n in ((OnePeerExponential(), 8), (DirectedExponential(), 8), (Hypercube(), 16), (Ring(), 16)):
        ExactDiffusion(graph).check(n)
        assert spread_after(diffusion, graph, n, 1200) < 1e-2


@pytest.mark.slow
def test_exact_diffusion_is_unbiased_on_changing_graphs_that_it_accepts() -> None:
    problem = quadratic(8, DOUBLE)
    optimum = (problem.curvature[:, None] * problem.centre).sum(0) / problem.curvature.sum()
    real = together(8, ExactDiffusion(OnePeerExponential(), 0.5), problem, [0.2] * 500)
    assert (real - optimum).abs().max() < 1e-9


def test_nesterov_s_form_is_refused_where_workers_keep_little_of_their_own() -> None:
    DecentLaM(Eager()).check(8)
    with pytest.raises(ConfigError, match=r"nesterov=True.*would grow") as refused:
        DecentLaM(Eager(), nesterov=True).check(8)
    assert spread_after(of(machines.decentlam, momentum=0.9), Eager(), 8, 600) < 1e-3
    assert spread_after(of(machines.decentlam, momentum=0.9, nesterov=True), Eager(), 8, 600) > 1e3
    lowest = float(np.linalg.eigvalsh(Eager().matrix(8, 0))[0])
    bound_in_error = re.search(r"[lL]ower the momentum to (\d\.\d\d) or less", str(refused.value))
    assert bound_in_error
    assert float(bound_in_error[1]) <= (-1 / lowest - 1) / 2 < float(bound_in_error[1]) + 0.01


def test_the_alternatives_in_the_error_are_accepted() -> None:
    for recipe, n in (
        (DecentLaM(OnePeerExponential()), 8),
        (DecentLaM(OnePeerExponential()), 32),
        (DecentLaM(Hypercube(), 0.95), 16),
        (ExactDiffusion(OnePeerExponential()), 32),
    ):
        with pytest.raises(ConfigError) as refused:
            recipe.check(n)
        offered = re.findall(r"[uU]se ((\w+)\((\w+)\(\), momentum=([\d.]+)\))", str(refused.value))
        assert "a static symmetric graph, such as Ring()" in str(refused.value)
        assert ("ExactDiffusion" in [name for _, name, _, _ in offered]) == (n < 32)
        assert "QuasiGlobal" in [name for _, name, _, _ in offered]
        for _, name, graph, momentum in offered:
            kind = {"QuasiGlobal": QuasiGlobal, "ExactDiffusion": ExactDiffusion}[name]
            kind(getattr(thinwire, graph)(), float(momentum)).check(n)
        type(recipe)(Ring(), recipe.momentum).check(n)


def test_no_momentum_is_small_enough_where_gossip_itself_is_not_stable() -> None:
    assert largest_stable_momentum(Ring(), 8, lambda beta: exact_diffusion()) == 0.99
    assert largest_stable_momentum(OnePeerExponential(), 32, lambda beta: exact_diffusion()) is None


@pytest.mark.parametrize("graph", [RandomMatching(seed=2, draws=24), OnePeerExponential()], ids=str)
def test_growth_that_is_measured_on_many_workers_is_that_of_the_whole_matrix(graph: Topology) -> None:
    n = 150
    apart = np.kron(np.eye(2), np.eye(n) - 1 / n)
    for method in (decentlam(0.9), decentlam(0.3), quasi_global(0.9, memory=0.9), exact_diffusion()):
        period = apart
        for step in range(graph.period(n)):
            one = np.kron(np.array(method.mixed), graph.matrix(n, step)) + np.kron(np.array(method.kept), np.eye(n))
            period = one @ period
        whole = np.abs(np.linalg.eigvals(period)).max() ** (1 / graph.period(n))
        assert abs(growth(graph, n, method) / whole - 1) < 0.02
        assert (growth(graph, n, method) < 1) == (whole < 1)


def test_a_static_symmetric_graph_has_the_growth_of_its_eigenvalues() -> None:
    # A ring's eigenvalues are (1 + 2 cos(2 pi k / n)) / 3.
    n, beta = 200, 0.9
    eigenvalues = (1 + 2 * np.cos(2 * np.pi * np.arange(1, n) / n)) / 3
    roots = [np.abs(np.roots([1, -(each + beta), beta])).max() for each in eigenvalues]
    assert abs(growth(Ring(), n, decentlam(beta)) - max(roots)) < 1e-9
