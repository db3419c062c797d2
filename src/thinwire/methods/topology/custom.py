# SPDX-License-Identifier: Apache-2.0
"""A graph given by its edges, or by a networkx graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import lru_cache
from typing import Any, Protocol

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Peers, Topology, Weights, weighted
from thinwire.registry import registered

Pair = tuple[int, int]


class NetworkxGraph(Protocol):
    """The part of a networkx graph that is used."""

    @property
    def nodes(self) -> Iterable[Hashable]:
        """Return the nodes, one for each worker."""
        ...

    @property
    def edges(self) -> Iterable[Any]:
        """Return pairs of nodes, followed by a key if edges may be parallel."""
        ...

    def is_directed(self) -> bool:
        """Return True if edges have a direction."""
        ...


@registered
class FromGraph(Topology):
    """Any graph, the same at every step, given by its edges.

    For an edge between ranks with `m` and `n` peers, the Metropolis-Hastings weight is `1 / (1 + max(m, n))`, as in
    Xiao and Boyd, Fast Linear Iterations for Distributed Averaging, Systems & Control Lett. 53, 2004.

    Args:
        edges: pairs of ranks. The number of workers is the highest rank plus one.
        directed: whether an edge (i, j) goes from i to j only.
        weights: the rule for the mixing weights. "metropolis" (Metropolis-Hastings) preserves the workers' average on
            any undirected graph. "push-sum" works on any graph: every rank splits its vector evenly among itself and
            the ranks it sends to, which needs the strategy `PushSum`. "uniform" gives a rank and its peers equal
            weights, which preserves the average only if all ranks have equally many peers; other graphs are refused.

    Raises:
        ConfigError: an edge is not a pair of ranks, is a self-loop or is repeated; or the graph does not allow these
            weights.

    Example:
        >>> path = FromGraph(edges=((0, 1), (1, 2)))
        >>> path.matrix(size=3, step=0).round(2).tolist()
        [[0.67, 0.33, 0.0], [0.33, 0.33, 0.33], [0.0, 0.33, 0.67]]
    """

    edges: tuple[Pair, ...] = ()
    directed: bool = False
    weights: Weights = "metropolis"

    def __post_init__(self) -> None:
        if not isinstance(self.edges, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"FromGraph: edges={self.edges!r}: must be pairs of ranks, such as ((0, 1), (1, 2))")
        object.__setattr__(self, "edges", _in_order(self.edges, directed=self.directed))
        if self.directed and self.weights == "metropolis":
            raise ConfigError(
                "FromGraph(directed=True, weights='metropolis'): Metropolis-Hastings weights need edges in both "
                "directions. Use weights='push-sum', for any directed graph"
            )
        degrees = {len(each) for side in _neighbours(self.edges, self.directed) for each in side}
        if self.weights == "uniform" and len(degrees) > 1:
            raise ConfigError(
                f"FromGraph(weights='uniform'): workers have from {min(degrees)} to {max(degrees)} peers, and uniform "
                "weights preserve the average only if all have equally many. Use weights='metropolis', or 'push-sum' "
                "if edges are directed"
            )

    @classmethod
    def from_networkx(cls, graph: NetworkxGraph, weights: Weights | None = None) -> FromGraph:
        """Make the topology of a networkx graph; nodes become ranks in order, attributes are ignored.

        Args:
            graph: `networkx.Graph` or `DiGraph`; nodes with the numbers 0 to n-1 keep these as ranks.
            weights: the rule; by default "metropolis", or "push-sum" if the graph is directed.

        Raises:
            ConfigError: the graph has no nodes or a node without edges, or the class refuses an argument.
        """
        nodes = list(graph.nodes)
        names: list[Hashable] = list(range(len(nodes)))
        ranks = {node: rank for rank, node in enumerate(names if set(nodes) == set(names) else nodes)}
        edges = tuple((ranks[edge[0]], ranks[edge[1]]) for edge in graph.edges)
        if not nodes:
            raise ConfigError("FromGraph.from_networkx: the graph has no nodes: it needs one for each worker")
        for node in ranks.keys() - {node for edge in graph.edges for node in edge[:2]} if len(nodes) > 1 else ():
            raise ConfigError(f"FromGraph.from_networkx: node {node!r} has no edge. Connect it or remove it")
        directed = graph.is_directed()
        return cls(edges, directed, weights or ("push-sum" if directed else "metropolis"))

    @property
    def workers(self) -> int:
        """Return the number of workers that the graph needs."""
        return len(_neighbours(self.edges, self.directed)[0])

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks at the other ends of this rank's edges."""
        dst, src = _neighbours(self.edges, self.directed)
        return weighted(rank, dst, src, self.weights)

    def check(self, size: int) -> None:
        """Check that the number of workers is `workers`."""
        if size != self.workers:
            raise ConfigError(
                f"FromGraph with {len(self.edges)} edges is for {self.workers} workers, not for {size}. Start "
                f"{self.workers}, or use a graph for any number, such as BaseGraph() or Ring()"
            )


def _in_order(edges: Iterable[Pair], *, directed: bool) -> tuple[Pair, ...]:
    """Return each edge once and sorted; undirected ones start at their lower rank."""
    found: set[Pair] = set()
    for edge in edges:
        one, other = _pair(edge)
        if one == other:
            raise ConfigError(
                f"FromGraph(edges=...{edge}...): a self-loop. The share that rank {one} keeps is its own weight"
            )
        pair = (one, other) if directed else (min(one, other), max(one, other))
        if pair in found:
            raise ConfigError(f"FromGraph(edges=...{edge}...): this edge is repeated. Keep one")
        found.add(pair)
    return tuple(sorted(found))


def _pair(edge: object) -> Pair:
    # Recipes come from text, so an edge may have any type; True would pass as a rank with isinstance.
    if isinstance(edge, (tuple, list)) and len(edge) == 2:
        one, other = edge
        if type(one) is type(other) is int and min(one, other) >= 0:
            return one, other
    raise ConfigError(f"FromGraph(edges=...{edge!r}...): an edge must be a pair of ranks from 0, such as (0, 1)")


@lru_cache(maxsize=64)
def _neighbours(
    edges: tuple[Pair, ...], directed: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return for every rank the ranks that it sends to, and those that it receives from."""
    both = edges if directed else (*edges, *((j, i) for i, j in edges))
    size = 1 + max((max(edge) for edge in edges), default=0)
    dst: list[list[int]] = [[] for _ in range(size)]
    src: list[list[int]] = [[] for _ in range(size)]
    for i, j in sorted(both):
        dst[i].append(j)
        src[j].append(i)
    return tuple(map(tuple, dst)), tuple(map(tuple, src))
