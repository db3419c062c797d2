# SPDX-License-Identifier: Apache-2.0
"""How fast graphs agree, and edges and weights that are refused. The battery asks every graph about its edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.methods.topology.graphs import product
from tests.oracles import common as oracles
from tests.problems import Irregular
from tests.rules import for_each, refusals
from thinwire import (
    Complete,
    ConfigError,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    Ring,
    Topology,
)
from thinwire.methods.topology import Peers
from thinwire.methods.topology.analysis import contraction
from thinwire.methods.topology.base import check_edges, doubly_stochastic


def test_graphs_mix_as_their_definitions_do() -> None:
    for n in (1, 2, 3, 4, 5, 8, 12, 16):
        pairs = [(Ring(), oracles.ring), (Complete(), oracles.complete), (OnePeerExponential(), oracles.one_peer)]
        if n & (n - 1) == 0:
            pairs.append((Hypercube(), oracles.cube))
        for topology, mixing in pairs:
            for step in range(2 * topology.period(n)):
                wanted = mixing(n, torch.float64)(step).numpy()
                assert np.allclose(topology.matrix(n, step), wanted, rtol=0, atol=1e-15), (topology, n, step)


@for_each([OnePeerExponential(), Hypercube()])
def test_powers_of_two_average_exactly_in_one_period(topology: Topology) -> None:
    for n in (1, 2, 4, 8, 16, 32, 64, 128):
        assert topology.period(n) == max(1, n.bit_length() - 1)
        assert np.array_equal(product(topology, n), np.full((n, n), 1 / n))


def test_one_peer_leaves_at_most_a_quarter_of_any_disagreement_after_a_period() -> None:
    for n in range(1, 65):
        assert contraction(OnePeerExponential(), n) <= 0.25 + 1e-12


@pytest.mark.parametrize(("n", "left"), [(3, 0.25), (5, 0.20), (6, 0.22), (7, 0.125), (12, 0.21), (24, 0.21)])
def test_one_peer_agrees_as_fast_as_known(n: int, left: float) -> None:
    assert contraction(OnePeerExponential(), n) == pytest.approx(left, abs=0.005)


def test_workers_must_fill_whole_nodes() -> None:
    with pytest.raises(ConfigError, match=r"10 workers: they must fill.*Use 8 or 12 workers, or node_size=2"):
        check_edges(Hierarchical(4), 10)
    with pytest.raises(ConfigError, match=r"Hypercube\(\) with 3 workers: needs a power of two"):
        check_edges(Hierarchical(4, between=Hypercube()), 12)


@dataclass(frozen=True)
class Drawn(Topology):
    """A graph of one step, given by one row per rank."""

    rows: tuple[Peers, ...]

    def peers(self, rank: int, size: int, step: int) -> Peers:
        return self.rows[rank]


def unconnected() -> Peers:
    return Peers((), (), 1.0, ())


test_a_graph_that_cannot_work_is_refused_with_the_reason = refusals(
    [
        ([Peers((1,), (), 0.5, ()), Peers((), (), 1.0, ())], "the edge 0 -> 1 exists at one end only"),
        ([Peers((), (1,), 0.5, (0.5,)), unconnected()], "the edge 1 -> 0 exists at one end only"),
        ([Peers((2,), (), 0.5, ()), unconnected()], "the edge 0 -> 2 exists at one end only"),
        ([Peers((0,), (0,), 0.5, (0.5,)), unconnected()], "rank 0 sends to itself"),
        ([Peers((1, 1), (), 0.5, ()), Peers((), (0, 0), 0.5, (0.25, 0.25))], "an edge exists twice"),
        ([Peers((1,), (1,), 0.5, (0.5,)), Peers((0,), (0,), 0.5, ())], "rank 1 has 0 weights for 1 received vectors"),
        ([Peers((1,), (1,), 0.0, (1.0,)), Peers((0,), (0,), 0.0, (1.0,))], "every weight must be positive"),
        ([Peers((1,), (1,), 1.5, (-0.5,)), Peers((0,), (0,), 1.5, (-0.5,))], "every weight must be positive"),
        ([Peers((1,), (1,), 0.5, (0.5,)), Peers((0,), (0,), 0.5, (0.4,))], "rank 0 keeps and sends 0.9 of its vector"),
        ([Peers((1,), (1,), 0.5, (float("nan"),)), Peers((0,), (0,), 0.5, (0.5,))], "weights|keeps and sends nan"),
        ([unconnected(), unconnected()], "no message travels from rank 0 to rank 1"),
        ([Peers((1,), (), 0.5, ()), Peers((), (0,), 1.0, (0.5,))], "no message travels from rank 1 to rank 0"),
    ],
    lambda rows: check_edges(Drawn(tuple(rows)), len(rows)),
)


def test_doubly_stochastic_checks_rows_and_columns() -> None:
    rows_alone = Drawn((Peers((1,), (), 1.0, ()), Peers((), (0,), 0.5, (0.5,))))
    columns_alone = Drawn((Peers((1,), (), 0.5, ()), Peers((), (0,), 1.0, (0.5,))))
    both = Drawn((Peers((1,), (1,), 0.7, (0.3,)), Peers((0,), (0,), 0.7, (0.3,))))
    assert [doubly_stochastic(graph, 2) for graph in (rows_alone, columns_alone, both)] == [False, False, True]


def test_two_islands_are_refused_however_many_workers_there_are() -> None:
    @dataclass(frozen=True)
    class Islands(Topology):
        def peers(self, rank: int, size: int, step: int) -> Peers:
            half = size // 2
            other = (rank + 1) % half + half * (rank // half)
            before = (rank - 1) % half + half * (rank // half)
            return Peers((other,), (before,), 0.5, (0.5,))

    for n in (8, 400):
        with pytest.raises(ConfigError, match=f"{n} workers: no message travels from rank 0 to rank {n // 2}"):
            check_edges(Islands(), n)


def test_an_irregular_directed_graph_passes_and_is_known_to_move_the_average() -> None:
    for n in range(1, 20):
        check_edges(Irregular(), n)
    assert not doubly_stochastic(Irregular(), 5)
    assert doubly_stochastic(Irregular(), 1)
