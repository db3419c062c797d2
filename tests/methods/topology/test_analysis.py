# SPDX-License-Identifier: Apache-2.0
"""The analysis of a graph agrees with a loop over its steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.methods.topology.graphs import GRAPHS, KEEPING, exists, mixings, product
from tests.problems import Breathing, Irregular
from tests.rules import for_each
from thinwire import (
    BaseGraph,
    BipartiteExponential,
    Comm,
    Complete,
    ConfigError,
    DirectedExponential,
    FromGraph,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    Star,
    Topology,
    run_threads,
)
from thinwire.methods.reduce.compressed_all_reduce import gossip_
from thinwire.methods.topology import Peers
from thinwire.methods.topology.analysis import (
    column_stochastic,
    connected,
    contraction,
    disagreement,
    eigenvalues,
    facts,
    matrices,
    spectral_gap,
    static,
    steps_to,
    steps_to_average,
    symmetric,
    traffic,
)

LOPSIDED = FromGraph(((0, 1), (1, 2), (2, 0), (0, 2)), directed=True, weights="push-sum")


def size_for(topology: Topology) -> int:
    return 12 if exists(topology, 12) else 16


def left_after(topology: Topology, n: int, count: int) -> list[float]:
    """The disagreement of push-sum's de-biased vectors after 0, 1, ... steps, on the unit vectors."""
    x, w, found = np.eye(n), np.ones(n), []
    for step in range(count + 1):
        found.append(float(np.linalg.norm(x / w[:, None] - 1 / n, 2)))
        mixing = topology.matrix(n, step)
        x, w = mixing @ x, mixing @ w
    return found


@for_each([*GRAPHS, LOPSIDED, Irregular()])
def test_disagreement_and_the_steps_it_takes_are_those_of_a_loop(topology: Topology) -> None:
    for n in (3, 8):
        if (topology is LOPSIDED and n != 3) or not exists(topology, n):
            continue
        left = left_after(topology, n, 150)
        assert np.allclose(disagreement(topology, n, 20), left[:21], rtol=0, atol=1e-13)
        for share in (0.5, 1e-3, 1e-6):
            assert steps_to(topology, n, share) == next(step for step, each in enumerate(left) if each <= share)


def test_exact_averages_are_distinguished_from_close_ones() -> None:
    many = RandomMatching(draws=160)
    assert contraction(many, 3) < 1e-12 and steps_to_average(many, 3) is None
    assert [steps_to_average(Hypercube(), n) for n in (1, 2, 64)] == [0, 1, 6]
    assert steps_to_average(BaseGraph(), 11) == BaseGraph().period(11)
    assert [steps_to_average(graph, 12) for graph in (Ring(), OnePeerExponential(), Complete())] == [None, None, 1]


def test_the_thousands_of_steps_of_a_ring_of_128_are_not_counted_one_by_one() -> None:
    largest = (1 + 2 * np.cos(2 * np.pi / 128)) / 3
    assert steps_to(Ring(), 128) == int(np.ceil(np.log(1e-3) / np.log(largest)))
    assert steps_to(Ring(), 128, 1e-12) == int(np.ceil(np.log(1e-12) / np.log(largest)))


def test_the_gap_is_one_minus_the_second_modulus() -> None:
    for graph in (Ring(), Star(), Star("push-sum"), DirectedExponential()):
        for n in (3, 7, 16):
            assert spectral_gap(graph, n) == pytest.approx(1 - abs(eigenvalues(graph, n)[1]), abs=1e-10)
    assert spectral_gap(Complete(), 9) == spectral_gap(OnePeerExponential(), 8) == spectral_gap(BaseGraph(), 7) == 1
    assert spectral_gap(OnePeerExponential(), 3) == pytest.approx(0.5, abs=1e-9)


@for_each([3, 6, 7, 12])
def test_the_gap_of_a_changing_graph_is_its_rate_in_the_long_run(n: int) -> None:
    for graph in (OnePeerExponential(), RandomMatching(draws=8)):
        period = graph.period(n)
        late = np.linalg.norm(np.linalg.matrix_power(product(graph, n) - 1 / n, 12), 2)
        assert (1 - spectral_gap(graph, n)) ** (12 * period) == pytest.approx(late, rel=3)


def test_what_is_static_and_what_is_symmetric() -> None:
    graphs = {str(graph): graph for graph in GRAPHS}
    still = {name for name, graph in graphs.items() if static(graph, size_for(graph))}
    even = {name for name, graph in graphs.items() if symmetric(graph, size_for(graph))}
    assert still == {
        "Ring()",
        "Torus()",
        "Star()",
        "Star(weights='push-sum')",
        "Complete()",
        "SymmetricExponential()",
        "SymmetricExponential(base=4)",
        "DirectedExponential()",
    }
    directed = {"DirectedExponential()", "OnePeerExponential()", "PPeerExponential()", "PPeerExponential(degree=5)"}
    assert even == graphs.keys() - directed - {"Star(weights='push-sum')", "Hierarchical()"}
    assert static(OnePeerExponential(), 2) and not static(Breathing(), 4)


def keeps_equal_vectors(graph: Topology, size: int) -> bool:
    """Whether rows sum to one."""
    return bool(np.allclose(matrices(graph, size).sum(2), 1.0, rtol=0, atol=1e-12))


def test_sums_of_rows_and_of_columns() -> None:
    for graph in [graph for graph in GRAPHS if exists(graph, 12)]:
        assert column_stochastic(graph, 12)
        assert keeps_equal_vectors(graph, 12) == (graph in KEEPING)


class Rows(Ring):
    """Two workers, one of which only receives: rows sum to one, columns do not."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return Peers((1,), (), 1.0, ()) if rank == 0 else Peers((), (0,), 0.5, (0.5,))


def test_graphs_that_lose_mass_or_are_not_connected_are_recognised() -> None:
    graph = Rows()
    assert keeps_equal_vectors(graph, 2) and not column_stochastic(graph, 2)
    assert not connected(graph, 2) and steps_to(graph, 2) is None and steps_to_average(graph, 2) is None
    assert all(connected(each, 8) for each in GRAPHS if exists(each, 8))


def test_eigenvalues_of_changing_graphs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"OnePeerExponential\(\) with 8 workers changes from step to step"):
        eigenvalues(OnePeerExponential(), 8)
    assert eigenvalues(Ring(), 8).dtype == np.float64
    assert eigenvalues(DirectedExponential(), 8).dtype == np.complex128


def test_results_that_are_kept_cannot_be_changed() -> None:
    for kept in (matrices(Ring(), 4), eigenvalues(Ring(), 4)):
        with pytest.raises(ValueError, match="read-only"):
            kept[0] = 0


def test_messages_are_counted_per_worker_and_step() -> None:
    for n in (1, 2, 9, 16):
        for graph in [graph for graph in GRAPHS if exists(graph, n)]:
            sent = np.array([[len(graph.peers(i, n, s).dst) for i in range(n)] for s in range(graph.period(n))])
            got = np.array([[len(graph.peers(i, n, s).src) for i in range(n)] for s in range(graph.period(n))])
            found = traffic(graph, n)
            assert found.mean == pytest.approx(sent.mean())
            assert found.busiest == pytest.approx(max(sent.mean(0).max(), got.mean(0).max()))
            assert found.peak == max(sent.max(), got.max())
    assert traffic(Star(), 5).mean == pytest.approx(8 / 5) and traffic(Star(), 5).busiest == 4
    assert traffic(LOPSIDED, 3).peak == 2


@pytest.mark.slow
def test_all_facts_of_every_graph_are_there_for_128_workers() -> None:
    for graph in GRAPHS:
        n = 128 if exists(graph, 128) else 126
        found = facts(graph, n)
        assert 0 < found.spectral_gap <= 1 and found.vectors_per_step <= found.busiest_vectors_per_step + 1e-12
        assert found.steps_to_a_thousandth is not None
        assert (found.smallest_eigenvalue is None) == (not (found.static and found.symmetric))
        assert (found.steps_to_average is None) == (found.spectral_gap < 1)


def test_facts_can_be_computed_by_many_threads_at_once() -> None:
    found: list[float] = []
    asking = [threading.Thread(target=lambda: found.append(spectral_gap(Ring(), 41))) for _ in range(8)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


# -- on comms ----------------------------------------------------------------------------------------------------------


def mixed(comm: Comm, graphs: list[Topology]) -> list[list[float]]:
    """One rank's vector after a period of each graph."""
    found: list[list[float]] = []
    for graph in graphs:
        x: Tensor = torch.eye(comm.size, dtype=torch.float64)[comm.rank].clone()
        for step in range(graph.period(comm.size)):
            gossip_(comm, x, graph.peers(comm.rank, comm.size, step)).wait()
        found.append(x.tolist())
    return found


@pytest.mark.parametrize("n", [4, 6, 9])
def test_threads_mix_as_the_matrices_do(n: int) -> None:
    graphs = [*(graph for graph in GRAPHS if exists(graph, n)), Irregular()]
    rows = run_threads(n, lambda comm: mixed(comm, graphs), timeout=30)
    for place, graph in enumerate(graphs):
        assert np.allclose([row[place] for row in rows], product(graph, n), rtol=0, atol=1e-14), graph


def test_a_bipartite_graph_works_with_methods_that_exchange_in_pairs() -> None:
    for n in (2, 6, 10, 16):
        for mixing in mixings(BipartiteExponential(), n):
            assert np.array_equal(mixing @ mixing, mixing)
