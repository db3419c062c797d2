# SPDX-License-Identifier: Apache-2.0
"""Graphs that the certificate refuses diverge, those that it accepts converge, and it agrees with closed forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import common as oracles
from tests.oracles import gossip as oracles_gossip
from tests.oracles.common import Mixing
from tests.problems import Quadratic, quadratic, together
from thinwire import Complete, ConfigError, Gossip, Hypercube, OnePeerExponential, Ring, Topology
from thinwire.methods.strategies import Strategy
from thinwire.methods.strategies.gossip.decentlam import DecentLaM
from thinwire.methods.strategies.gossip.double_averaging import DoubleAveraging
from thinwire.methods.strategies.gossip.exact_diffusion import ExactDiffusion
from thinwire.methods.strategies.gossip.quasi_global import QuasiGlobal
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


def mixing_matrix(graph: Topology, n: int, step: int) -> np.ndarray:
    found = np.zeros((n, n))
    for rank in range(n):
        peers = graph.peers(rank, n, step)
        found[rank, [rank, *peers.src]] = [peers.own, *peers.weights]
    return found


Oracle = Callable[..., Tensor]


@dataclass(frozen=True)
class Ahead(Topology):
    """All ranks 1, 2, 4, ... places ahead, at every step: directed, with complex eigenvalues."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        hops = [1 << i for i in range((size - 1).bit_length())]
        dst = tuple((rank + hop) % size for hop in hops)
        src = tuple((rank - hop) % size for hop in hops)
        return Peers(dst, src, 1 / (len(hops) + 1), (1 / (len(hops) + 1),) * len(hops))


@dataclass(frozen=True)
class Matching(Topology):
    """Random pairs, drawn at every step."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        order = np.random.default_rng(step % self.period(size)).permutation(size)
        place = int(np.flatnonzero(order == rank)[0])
        other = place ^ 1
        if other >= size:
            return Peers((), (), 1.0, ())
        return Peers((int(order[other]),), (int(order[other]),), 0.5, (0.5,))

    def period(self, size: int) -> int:
        return 24


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


def spread_after(oracle: Oracle, topology: Topology, n: int, steps: int, rate: float = 0.01) -> float:
    """How far workers are apart, relative to their start, after steps on a flat quadratic."""
    bowl = Quadratic(torch.ones(n, dtype=DOUBLE), torch.zeros(n, 3, dtype=DOUBLE))
    start = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=DOUBLE)
    end = oracle(bowl.gradient, start, [rate] * steps, mixing=mixing(topology, n))
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


def test_decentlam_is_stable_on_exactly_the_modes_of_the_closed_form() -> None:
    draw = np.random.default_rng(1)
    outcomes: list[bool] = []
    for _ in range(2000):
        beta, mode = draw.uniform(0, 0.98), np.sqrt(draw.uniform()) * np.exp(1j * draw.uniform(0, 2 * np.pi))
        width = (1 - beta) * np.sqrt(1 - ((mode.real + beta) / (1 + beta)) ** 2)
        if abs(abs(mode.imag) / width - 1) < 1e-6:
            continue
        outcomes.append(bool(abs(mode.imag) < width))
        assert (radius(decentlam(beta), mode) < 1) == outcomes[-1], (beta, mode)
    assert 200 < sum(outcomes) < 1800


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_on_symmetric_graphs_heavy_ball_is_always_stable_and_nesterov_down_to_a_bound(beta: float) -> None:
    for mode in np.linspace(-0.999, 0.999, 41):
        assert radius(decentlam(beta), mode) < 1
        assert radius(exact_diffusion(), mode) < 1
    bound = -1 / (1 + 2 * beta)
    assert radius(decentlam(beta, nesterov=True), bound + 1e-6) < 1
    assert beta == 0 or radius(decentlam(beta, nesterov=True), bound - 1e-6) > 1


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
            peers = Ahead().peers(rank, size, step)
            return peers._replace(own=peers.own + 1e-15 * (step % 2))

        def period(self, size: int) -> int:
            return 2

    for method in (decentlam(0.5), decentlam(0.9), quasi_global(0.9, memory=0.9), exact_diffusion()):
        assert abs(growth(Ahead(), 8, method) - growth(Twice(), 8, method)) < 1e-7


# -- refused and accepted ----------------------------------------------------------------------------------------------

CHANGING: list[tuple[Topology, int]] = [
    (OnePeerExponential(), 8),
    (OnePeerExponential(), 5),
    (Hypercube(), 16),
    (Matching(), 8),
    (Ahead(), 8),
    (Ahead(), 5),
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
    below, above = (partial(oracles_gossip.decentlam, momentum=bound + off) for off in (-0.03, 0.06))
    assert spread_after(below, graph, n, 600) < 1e-3
    assert spread_after(above, graph, n, 600) > 1e3


@pytest.mark.parametrize(("graph", "n"), CHANGING, ids=str)
def test_the_growth_that_is_certified_is_the_growth_that_happens(graph: Topology, n: int) -> None:
    period = graph.period(n)
    for method, oracle in (
        (decentlam(0.9), partial(oracles_gossip.decentlam, momentum=0.9)),
        (decentlam(0.95, nesterov=True), partial(oracles_gossip.decentlam, momentum=0.95, nesterov=True)),
    ):
        factor = growth(graph, n, method)
        first, second = (spread_after(oracle, graph, n, steps, 1e-9) for steps in (10 * period, 30 * period))
        if factor > 1.01:
            assert abs((second / first) ** (1 / (20 * period)) / factor - 1) < 0.02
        else:
            assert second < 2 * first


@pytest.mark.parametrize(("graph", "n"), [*CHANGING, (OnePeerExponential(), 32), (Ring(), 8)], ids=str)
@pytest.mark.parametrize("momentum", [0.9, 0.95])
def test_quasi_global_and_local_momentum_are_stable_on_every_graph(graph: Topology, n: int, momentum: float) -> None:
    for nesterov in (False, True):
        QuasiGlobal(graph, momentum, nesterov).check(n)
        oracle = partial(oracles_gossip.quasi_global, momentum=momentum, nesterov=nesterov)
        assert spread_after(oracle, graph, n, 500) < 0.05
    Gossip(graph).check(n)
    DoubleAveraging(graph, momentum).check(n)
    assert spread_after(partial(oracles_gossip.double_averaging, momentum=momentum), graph, n, 500) < 0.05


def test_exact_diffusion_is_refused_where_its_corrections_diverge() -> None:
    for graph, n in ((OnePeerExponential(), 32), (Ahead(), 16), (Hypercube(), 32)):
        with pytest.raises(ConfigError, match=r"ExactDiffusion.*would grow by 1\.\d+ a step.*QuasiGlobal") as refused:
            ExactDiffusion(graph).check(n)
        assert "lower the momentum" not in str(refused.value)
        assert spread_after(partial(oracles_gossip.exact_diffusion, momentum=0.9), graph, n, 800) > 1e3
    for graph, n in ((OnePeerExponential(), 8), (Ahead(), 8), (Hypercube(), 16), (Ring(), 16)):
        ExactDiffusion(graph).check(n)
        assert spread_after(partial(oracles_gossip.exact_diffusion, momentum=0.9), graph, n, 1200) < 1e-2


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
    assert spread_after(partial(oracles_gossip.decentlam, momentum=0.9), Eager(), 8, 600) < 1e-3
    assert spread_after(partial(oracles_gossip.decentlam, momentum=0.9, nesterov=True), Eager(), 8, 600) > 1e3
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


def test_a_graph_is_refused_before_training_with_the_reason(world: int = 8) -> None:
    strategy: Strategy = DecentLaM(OnePeerExponential())
    with pytest.raises(
        ConfigError,
        match=r"DecentLaM\(topology=OnePeerExponential\(\)\) with 8 workers: differences between workers "
        r"would grow by 1\.1\d* a step, however small the learning rate\. Lower the momentum to 0\.\d\d",
    ):
        together(world, strategy, quadratic(world, DOUBLE), [0.1])


def test_no_momentum_is_small_enough_where_gossip_itself_is_not_stable() -> None:
    assert largest_stable_momentum(Ring(), 8, lambda beta: exact_diffusion()) == 0.99
    assert largest_stable_momentum(OnePeerExponential(), 32, lambda beta: exact_diffusion()) is None


def test_the_certificate_of_many_workers_is_quick_enough_for_every_run() -> None:
    for n in (2, 64, 128):
        QuasiGlobal(OnePeerExponential()).check(n)
        DecentLaM().check(n)
    assert growth(Ring(), 128, decentlam(0.9)) < 1
    assert abs(growth(Ring(), 128, exact_diffusion()) - 1) < 1e-2


@pytest.mark.parametrize("graph", [Matching(), OnePeerExponential()], ids=str)
def test_growth_that_is_measured_on_many_workers_is_that_of_the_whole_matrix(graph: Topology) -> None:
    n = 150
    apart = np.kron(np.eye(2), np.eye(n) - 1 / n)
    for method in (decentlam(0.9), decentlam(0.3), quasi_global(0.9, memory=0.9), exact_diffusion()):
        period = apart
        for step in range(graph.period(n)):
            mixing = mixing_matrix(graph, n, step)
            one = np.kron(np.array(method.mixed), mixing) + np.kron(np.array(method.kept), np.eye(n))
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


def test_oracles_mix_with_the_same_matrices_as_the_strategies() -> None:
    assert torch.equal(mixing(Ring(), 5)(0), oracles.ring(5, DOUBLE)(0))
    assert torch.equal(mixing(Ahead(), 8)(0), oracles_gossip.directed_exponential(8, DOUBLE)(0))
