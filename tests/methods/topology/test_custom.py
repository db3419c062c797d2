# SPDX-License-Identifier: Apache-2.0
"""Graphs from edges and from networkx: they mix as given, and those that cannot work are refused with the fix."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest

from tests.methods.topology.graphs import mixings
from tests.rules import for_each, refusals
from thinwire import ConfigError, FromGraph, Gossip, PushSum, Ring, Star, Torus, parse
from thinwire.methods.strategies.recipe import parse_topology
from thinwire.methods.topology.analysis import symmetric
from thinwire.methods.topology.base import check_edges, doubly_stochastic


def drawn(n: int, seed: int) -> nx.Graph:
    """A connected graph drawn at random: a random tree and some more edges."""
    graph = nx.random_labeled_tree(n, seed=seed)
    graph.add_edges_from(nx.gnm_random_graph(n, n // 2, seed=seed).edges)
    return graph


@for_each([2, 3, 7, 20, 64])
def test_metropolis_weights_keep_the_average_on_any_graph(n: int) -> None:
    graph = drawn(n, seed=n)
    topology = FromGraph.from_networkx(graph)
    check_edges(topology, n)
    mixing = mixings(topology, n)[0]
    degree = dict(graph.degree)
    for i in range(n):
        for j in range(n):
            if i != j:
                expected = 1 / (1 + max(degree[i], degree[j])) if graph.has_edge(i, j) else 0
                assert mixing[i, j] == expected
    assert doubly_stochastic(topology, n) and symmetric(topology, n)
    Gossip(topology).check(n)


@for_each([3, 8, 33])
def test_push_sum_weights_split_evenly_on_any_directed_graph(n: int) -> None:
    graph = nx.DiGraph([(i, (i + 1) % n) for i in range(n)])
    graph.add_edges_from(nx.gnp_random_graph(n, 0.2, seed=n, directed=True).edges)
    topology = FromGraph.from_networkx(graph)
    assert topology.directed and topology.weights == "push-sum"
    check_edges(topology, n)
    linked = nx.to_numpy_array(graph, nodelist=range(n)).T > 0
    shares = linked + np.eye(n)
    assert np.array_equal(mixings(topology, n)[0], shares / shares.sum(0))
    PushSum(topology).check(n)
    with pytest.raises(ConfigError, match=r"the weights are not doubly stochastic.*Use PushSum"):
        Gossip(topology).check(n)


def test_uniform_weights_are_metropolis_weights_where_all_have_as_many_peers() -> None:
    graph = nx.random_regular_graph(3, 10, seed=0)
    uniform, metropolis = (FromGraph.from_networkx(graph, weights) for weights in ("uniform", "metropolis"))
    assert np.allclose(mixings(uniform, 10)[0], mixings(metropolis, 10)[0], rtol=0, atol=1e-15)
    one_way = FromGraph(((0, 1), (1, 2), (2, 0)), directed=True, weights="uniform")
    assert doubly_stochastic(one_way, 3)


def test_a_graph_from_edges_can_equal_a_built_in_one() -> None:
    for house, graph in [(Ring(), nx.cycle_graph(9)), (Torus(), nx.grid_2d_graph(3, 4, periodic=True)), (Star(), None)]:
        n = len(graph) if graph else 6
        own = FromGraph(tuple((0, i) for i in range(1, n))) if graph is None else FromGraph.from_networkx(graph)
        assert np.allclose(mixings(own, n)[0], mixings(house, n)[0], rtol=0, atol=1e-15)


def test_nodes_become_ranks_in_their_order_and_numbers_stay() -> None:
    named = nx.Graph([("paris", "oslo"), ("oslo", "rome")])
    assert FromGraph.from_networkx(named).edges == ((0, 1), (1, 2))
    numbered = nx.Graph()
    numbered.add_nodes_from([2, 0, 1])
    numbered.add_edges_from([(2, 0), (0, 1)])
    assert FromGraph.from_networkx(numbered).edges == ((0, 1), (0, 2))


def test_edges_have_one_order_and_the_repr_is_the_recipe() -> None:
    one, other = FromGraph(((2, 1), (1, 0))), FromGraph(edges=[[0, 1], [1, 2]])  # type: ignore[arg-type]
    assert one == other and hash(one) == hash(other)
    assert repr(one) == "FromGraph(edges=((0, 1), (1, 2)), directed=False, weights='metropolis')"
    one_way = FromGraph(((1, 0), (0, 1)), directed=True, weights="push-sum")
    for graph in (one, one_way, FromGraph()):
        assert parse_topology(repr(graph)) == graph
        assert parse(repr(PushSum(graph))) == PushSum(graph)
    assert parse_topology("FromGraph([(1, 2), (0, 1)])") == one


def test_one_worker_alone_needs_no_edges() -> None:
    check_edges(FromGraph(), 1)
    assert FromGraph().workers == 1
    lonely = nx.Graph()
    lonely.add_node("a")
    assert FromGraph.from_networkx(lonely) == FromGraph()


@for_each([1, 3, 5, 128])
def test_a_graph_of_another_size_is_refused_with_what_to_use_instead(size: int) -> None:
    square = FromGraph(((0, 1), (1, 2), (2, 3), (3, 0)))
    for strategy in (PushSum(square), Gossip(square)):
        with pytest.raises(ConfigError, match=rf"is for 4 workers, not for {size}\. Start 4, or .*BaseGraph\(\)"):
            strategy.check(size)


def islands() -> nx.Graph:
    return nx.disjoint_union(nx.cycle_graph(3), nx.cycle_graph(4))


def isolated() -> nx.Graph:
    graph = nx.cycle_graph(3)
    graph.add_node("x")
    return graph


test_a_networkx_graph_that_cannot_work_is_refused = refusals(
    [
        (islands(), r"no message travels from rank 0 to rank 3\. Add edges .* such as Ring\(\)"),
        (nx.DiGraph([(0, 1), (1, 2)]), "no message travels from rank 1 to rank 0"),
        (isolated(), "node 'x' has no edge"),
        (nx.Graph(), "has no nodes"),
        (nx.Graph([(0, 1), (1, 1)]), r"\(1, 1\)...\): a self-loop. The share that rank 1 keeps is its own weight"),
        (nx.MultiGraph([(0, 1), (1, 0)]), "is repeated. Keep one"),
    ],
    lambda graph: PushSum(FromGraph.from_networkx(graph)).check(len(graph)),
)


test_edges_and_weights_that_make_no_graph_are_refused = refusals(
    [
        ({"edges": ((0, 1, 2),)}, r"an edge must be a pair of ranks from 0, such as \(0, 1\)"),
        ({"edges": ((0, -1),)}, "an edge must be a pair of ranks"),
        ({"edges": (("a", "b"),)}, "an edge must be a pair of ranks"),
        ({"edges": (3,)}, "an edge must be a pair of ranks"),
        ({"edges": ((0, True),)}, "an edge must be a pair of ranks"),
        ({"edges": 3}, "edges=3: must be pairs of ranks"),
        ({"edges": ((0, 1), (1, 0))}, "is repeated"),
        ({"edges": ((0, 0),)}, "a self-loop"),
        ({"edges": ((0, 1),), "directed": 1}, "directed must be True or False"),
        ({"edges": ((0, 1),), "weights": "even"}, "weights must be 'metropolis' or 'push-sum' or 'uniform'"),
        ({"edges": ((0, 1), (1, 0)), "directed": True}, "need edges in both directions. Use weights='push-sum'"),
        (
            {"edges": ((0, 1), (1, 2)), "weights": "uniform"},
            "from 1 to 2 peers, .* Use weights='metropolis', or",
        ),
    ],
    lambda arguments: FromGraph(**arguments),
)
