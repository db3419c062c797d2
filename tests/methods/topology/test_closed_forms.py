# SPDX-License-Identifier: Apache-2.0
"""Closed forms of each graph, and errors that are easily made in building it."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import combinations
from math import gcd

import networkx as nx
import numpy as np
import pytest

from tests.methods.topology.graphs import SIZES, Matrix, mixings, product
from tests.rules import for_each, refusals
from thinwire import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    DirectedExponential,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    Periodic,
    PPeerExponential,
    RandomMatching,
    Ring,
    Star,
    SymmetricExponential,
    Topology,
    Torus,
)
from thinwire.methods.topology.analysis import contraction, eigenvalues

# -- graphs that never change ------------------------------------------------------------------------------------------


def mixed_by(graph: nx.Graph, n: int) -> Matrix:
    """Equal weights for every rank and its neighbours, on a graph of networkx."""
    linked = nx.to_numpy_array(graph, nodelist=sorted(graph)) > 0
    np.fill_diagonal(linked, True)
    return linked / linked.sum(1, keepdims=True)


def test_a_torus_is_the_periodic_grid_nearest_to_a_square() -> None:
    for n, rows in {1: 1, 2: 1, 4: 2, 6: 2, 7: 1, 12: 3, 16: 4, 36: 6, 97: 1, 120: 10, 128: 8}.items():
        grid = nx.grid_2d_graph(rows, n // rows, periodic=True)
        assert np.allclose(mixings(Torus(), n)[0], mixed_by(grid, n), rtol=0, atol=1e-15)


def test_exponential_graphs_are_circulant_with_hops_of_powers() -> None:
    for n, ahead, both in [
        (2, [1], [1]),
        (5, [1, 2, 4], [1, 2]),
        (8, [1, 2, 4], [1, 2, 4]),
        (9, [1, 2, 4, 8], [1, 2, 4]),
    ]:
        assert np.allclose(mixings(SymmetricExponential(), n)[0], mixed_by(nx.circulant_graph(n, both), n))
        directed = [[1 / (len(ahead) + 1) * ((i - j) % n in [0, *ahead]) for j in range(n)] for i in range(n)]
        assert np.allclose(mixings(DirectedExponential(), n)[0], directed)
    assert np.allclose(mixings(SymmetricExponential(base=4), 40)[0], mixed_by(nx.circulant_graph(40, [1, 4, 16]), 40))


@pytest.mark.parametrize(("n", "left"), [(4, 1 / 3), (8, 0.5), (16, 0.6), (32, 2 / 3)])
def test_a_directed_exponential_graph_agrees_as_fast_as_known(n: int, left: float) -> None:
    assert contraction(DirectedExponential(), n) == pytest.approx(left, abs=1e-12)


def test_eigenvalues_are_those_of_the_formulas() -> None:
    for n in (3, 5, 8, 24, 128):
        turns = 2 * np.pi * np.arange(n) / n
        spectra: dict[Topology, list[complex]] = {
            Ring(): list(1 / 3 + 2 / 3 * np.cos(turns)),
            Complete(): [1.0] + [0.0] * (n - 1),
            Star(): [1.0, 0.0] + [1 - 1 / n] * (n - 2),
            SymmetricExponential(base=n): list(1 / 3 + 2 / 3 * np.cos(turns)),
        }
        for graph, expected in spectra.items():
            assert np.allclose(np.sort(eigenvalues(graph, n)), np.sort(expected), atol=1e-12), graph
    hops = np.exp(2j * np.pi * np.outer(np.arange(8), [0, 1, 2, 4]) / 8).mean(1)
    found = eigenvalues(DirectedExponential(), 8)
    assert max(min(abs(mode - other) for other in found) for mode in hops) < 1e-12
    assert np.allclose(np.abs(found), np.sort(np.abs(hops))[::-1])
    grid = [(1 + 2 * np.cos(a) + 2 * np.cos(b)) / 5 for a in np.pi / 2 * np.arange(4) for b in np.pi / 4 * np.arange(8)]
    assert np.allclose(np.sort(eigenvalues(Torus(), 32)), np.sort(grid), atol=1e-12)


def test_the_middle_of_a_star_sends_and_receives_most() -> None:
    for weights in ("metropolis", "push-sum"):
        star = Star(weights)
        assert star.peers(0, 6, 0).dst == star.peers(0, 6, 0).src == (1, 2, 3, 4, 5)
        assert all(star.peers(rank, 6, 0).dst == (0,) for rank in range(1, 6))
    leaf = [[1 / 6, 1 / 6], [1 / 2, 1 / 6]]
    assert [
        [star.peers(0, 6, 0).weights[0], star.peers(1, 6, 0).weights[0]] for star in (Star(), Star("push-sum"))
    ] == leaf


# -- graphs that change ------------------------------------------------------------------------------------------------


def exact(topology: Topology, n: int) -> bool:
    return bool(np.abs(product(topology, n) - 1 / n).max() < 1e-13)


def test_one_peer_is_exact_for_powers_of_two_alone() -> None:
    assert [n for n in range(1, 65) if exact(OnePeerExponential(), n)] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.slow
@pytest.mark.parametrize("degree", range(1, 9))
def test_p_peers_are_exact_where_the_longest_hop_returns_within_p_plus_one_times(degree: int) -> None:
    base, found = degree + 1, set[int]()
    for n in SIZES:
        steps = PPeerExponential(degree).period(n)
        assert n == 1 or base ** (steps - 1) < n <= base**steps
        if n // gcd(n, base ** (steps - 1)) <= base:
            found.add(n)
    assert {n for n in SIZES if exact(PPeerExponential(degree), n)} == found
    assert found >= {base**q for q in range(8)} & set(SIZES)
    if base in (2, 3, 5, 7):
        assert found == {c * base**q for q in range(8) for c in range(1, base + 1)} & set(SIZES)


def test_one_of_p_peers_is_one_peer() -> None:
    for n in SIZES:
        assert PPeerExponential(1).period(n) == OnePeerExponential().period(n)
        for step in range(8):
            assert PPeerExponential(1).peers(n - 1, n, step) == OnePeerExponential().peers(n - 1, n, step)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_the_base_graph_is_exact_for_every_number_of_workers_within_its_length(degree: int) -> None:
    base, graph = degree + 1, BaseGraph(degree)
    for n in SIZES:
        steps = mixings(graph, n)
        assert np.abs(product(graph, n) - 1 / n).max() < 1e-14
        assert base ** (len(steps) - 2) <= n * n
        for mixing in steps:
            assert np.array_equal(mixing, mixing.T)
            assert ((mixing > 0).sum(1) <= base).all()


def test_base_graphs_have_the_lengths_that_their_algorithms_give() -> None:
    lengths = {n: [BaseGraph(degree).period(n) for degree in (1, 2, 3)] for n in (1, 5, 6, 7, 8, 9, 25, 64)}
    assert lengths == {
        1: [1, 1, 1],
        5: [5, 3, 3],
        6: [4, 2, 2],
        7: [5, 4, 3],
        8: [3, 3, 2],
        9: [7, 2, 2],
        25: [9, 6, 5],
        64: [6, 6, 3],
    }


def test_in_a_bipartite_graph_every_rank_has_one_partner_on_the_other_side() -> None:
    graph = BipartiteExponential()
    assert [graph.active(rank) for rank in range(4)] == [False, True, False, True]
    for n in range(2, 65, 2):
        partners: set[int] = set()
        for step in range(graph.period(n)):
            for rank in range(n):
                (partner,) = graph.peers(rank, n, step).dst
                assert graph.active(partner) != graph.active(rank)
                assert graph.peers(partner, n, step).dst == (rank,)
            partners.add(graph.peers(0, n, step).dst[0])
        assert len(partners) == graph.period(n)
    assert [graph.peers(0, 16, step).dst[0] for step in range(8)] == [1, 15, 3, 13, 5, 11, 9, 7]


# -- random pairs ------------------------------------------------------------------------------------------------------


def pairs(graph: RandomMatching, n: int, step: int) -> list[tuple[int, ...]]:
    return [graph.peers(rank, n, step).dst for rank in range(n)]


def test_random_matchings_pair_all_ranks_but_one_of_an_odd_number() -> None:
    for n in SIZES:
        for step in range(4):
            partners = pairs(RandomMatching(), n, step)
            unpaired = [rank for rank, partner in enumerate(partners) if not partner]
            assert len(unpaired) == n % 2
            assert all(partners[partner[0]] == (rank,) for rank, partner in enumerate(partners) if partner)


def test_random_matchings_are_the_same_in_every_process_and_in_any_order_of_calls() -> None:
    calls = "[RandomMatching(7).peers(rank, 9, step).dst for step in (5, 2) for rank in range(9)]"
    code = f"from thinwire import RandomMatching; print({calls})"
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    here = [RandomMatching(7).peers(rank, 9, step).dst for rank in range(9) for step in (2, 5)]
    assert elsewhere.stdout.strip() == str(here[1::2] + here[::2])
    assert pairs(RandomMatching(), 6, 0) == [(5,), (4,), (3,), (2,), (1,), (0,)]


def test_all_pairs_are_drawn_equally_often_and_seeds_steps_and_sizes_differ() -> None:
    graph = RandomMatching(draws=3000)
    drawn = [pairs(graph, 6, step) for step in range(3000)]
    often = Counter((rank, partners[rank][0]) for partners in drawn for rank in range(6))
    assert all(abs(often[pair] - 600) < 100 for pair in combinations(range(6), 2))
    assert len({str(partners) for partners in drawn}) == 15
    assert len({str(pairs(RandomMatching(seed), 32, 0)) for seed in range(20)}) == 20
    assert pairs(RandomMatching(), 8, 1)[:4] != pairs(RandomMatching(), 9, 1)[:4]


# -- graphs of graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inside", "between", "every"),
    [
        (Complete(), OnePeerExponential(), 2),
        (OnePeerExponential(), BaseGraph(), 4),
        (Ring(), Complete(), 3),
        (Star("push-sum"), DirectedExponential(), 2),
    ],
    ids=str,
)
def test_a_period_of_a_hierarchy_is_the_product_of_its_parts(inside: Topology, between: Topology, every: int) -> None:
    for node_size, nodes in [(1, 5), (2, 3), (4, 4), (4, 6), (3, 1)]:
        graph = Hierarchical(node_size, inside, between, every)
        n = node_size * nodes
        turns, rest = divmod(graph.period(n), every)
        assert rest == 0 and turns % between.period(nodes) == 0
        far = np.linalg.matrix_power(product(between, nodes), turns // between.period(nodes))
        near = np.linalg.matrix_power(product(inside, node_size), turns * (every - 1) // inside.period(node_size))
        assert np.allclose(product(graph, n), np.kron(far, near), rtol=0, atol=1e-14)


def test_nodes_of_a_hierarchy_exchange_every_so_many_steps() -> None:
    graph = Hierarchical(4, every=3)
    for step in range(graph.period(16)):
        crossing = [i // 4 != j // 4 for i in range(16) for j in graph.peers(i, 16, step).dst]
        assert all(crossing) if step % 3 == 2 else not any(crossing)


def test_fewer_workers_than_a_node_has_are_one_node() -> None:
    assert [Hierarchical(8).peers(1, 3, step).dst for step in range(2)] == [(0, 2), ()]


# -- errors that are easily made ---------------------------------------------------------------------------------------


def test_no_hop_leads_back_to_its_start_or_to_one_peer_twice() -> None:
    for n in range(1, 65):
        for degree in range(1, 9):
            for step in range(PPeerExponential(degree).period(n)):
                dst = PPeerExponential(degree).peers(n // 2, n, step).dst
                assert n // 2 not in dst and len(set(dst)) == len(dst)
    for n, degree in [(6, 2), (8, 3), (32, 3), (10, 4)]:
        full_turns = [j * (degree + 1) ** i for i in range(4) for j in range(1, degree + 1)]
        assert n in full_turns
    assert PPeerExponential(2).peers(0, 6, 1).dst == (3,)
    assert [OnePeerExponential().peers(0, 4, step).dst for step in range(4)] == [(1,), (2,), (1,), (2,)]


@for_each([1, 2, 4, 9])
def test_the_longest_hop_is_not_lost_to_rounding(degree: int) -> None:
    base = degree + 1
    for power in (base**3, base**5):
        n, graph = power + 1, PPeerExponential(degree)
        assert power in graph.peers(0, n, graph.period(n) - 1).dst
        assert graph.period(power) == graph.period(n) - 1
    assert PPeerExponential(2).period(244) == 6
    assert [
        graph.period(1) for graph in (PPeerExponential(2), OnePeerExponential(), Hypercube(), BipartiteExponential())
    ]


test_numbers_that_make_no_graph_are_refused = refusals(
    [
        (lambda: PPeerExponential(0), "degree=0: must be at least 1"),
        (lambda: BaseGraph(0), "degree=0: must be at least 1"),
        (lambda: BaseGraph(1.5), "degree must be a whole number"),
        (lambda: SymmetricExponential(1), "base=1: must be at least 2"),
        (lambda: RandomMatching(draws=0), "draws=0: must be at least 1"),
        (lambda: Periodic(every=0), "every=0: must be at least 1"),
        (lambda: Hierarchical(0), "node_size=0: must be at least 1"),
        (lambda: Hierarchical(every=1), "every=1: must be at least 2"),
        (lambda: Hierarchical(inside=Ring), r"inside must be a Topology. Write Ring\(\)"),
        (lambda: Star("uniform"), "weights must be 'metropolis' or 'push-sum'"),
    ]
)
