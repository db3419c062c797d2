# SPDX-License-Identifier: Apache-2.0
"""The two sides of a bipartite graph: active ranks, which send requests, and passive ones, which answer.

A worker that waits for an answer while others wait for its own can close a cycle in which all workers wait. Where only
one side sends requests and only the other answers, there is no such cycle.
"""

from functools import lru_cache

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Topology


def neighbours(topology: Topology, rank: int, size: int) -> tuple[int, ...]:
    """All ranks that ever share an edge with `rank`, in either direction."""
    return _adjacency(topology, size)[rank]


def is_active(topology: Topology, rank: int, size: int) -> bool:
    """Whether `rank` is on the side that sends requests; rank 0 is on the side that answers.

    Raises:
        ConfigError: the graph is not bipartite.
    """
    return _active_ranks(topology, size)[rank]


def partner(topology: Topology, rank: int, size: int, step: int) -> int:
    """The neighbour to which `rank` sends its request at its own `step`: those of that step's graph in turn."""
    peers = topology.peers(rank, size, step)
    near = sorted({*peers.dst, *peers.src}) or neighbours(topology, rank, size)
    return near[step // topology.period(size) % len(near)]


def check_bipartite(topology: Topology, size: int) -> None:
    """Refuse a graph that is not connected or not bipartite.

    Raises:
        ConfigError: with two ranks that show it.
    """
    topology.check(size)
    _active_ranks(topology, size)


@lru_cache(maxsize=256)
def _adjacency(topology: Topology, size: int) -> tuple[tuple[int, ...], ...]:
    """Every rank's neighbours, over all steps of a period and in both directions."""
    near: list[set[int]] = [set() for _ in range(size)]
    for step in range(topology.period(size)):
        for rank in range(size):
            for other in topology.peers(rank, size, step).dst:
                near[rank].add(other)
                near[other].add(rank)
    return tuple(tuple(sorted(each)) for each in near)


@lru_cache(maxsize=256)
def _active_ranks(topology: Topology, size: int) -> tuple[bool, ...]:
    """For each rank whether it is an odd number of edges away from rank 0, by breadth-first search."""
    graph, active = _adjacency(topology, size), {0: False}
    queue = [0]
    for rank in queue:
        fresh = [other for other in graph[rank] if other not in active]
        active |= dict.fromkeys(fresh, not active[rank])
        queue += fresh
    if len(active) < size:
        apart = min(set(range(size)) - active.keys())
        raise ConfigError(f"{topology} with {size} workers: nothing ever travels between ranks 0 and {apart}")
    for one, near in enumerate(graph):
        for other in near:
            if active[one] == active[other]:
                raise ConfigError(
                    f"{topology} with {size} workers: ranks {one} and {other} share an edge on the same side, so the "
                    "graph is not bipartite; use BipartiteExponential() and an even number of workers"
                )
    return tuple(active[rank] for rank in range(size))
