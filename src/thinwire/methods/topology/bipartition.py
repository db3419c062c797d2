# SPDX-License-Identifier: Apache-2.0
"""The two sides of a bipartite graph: active ranks send requests, passive ranks answer.

A worker that waits for an answer while others wait for its own answer can close a cycle in which all workers wait. If
only one side sends requests and only the other answers, no such cycle exists.
"""

from functools import lru_cache

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Topology


def neighbours(topology: Topology, rank: int, size: int) -> tuple[int, ...]:
    """Return all ranks that ever share an edge with `rank`, in either direction."""
    return _adjacency(topology, size)[rank]


def is_active(topology: Topology, rank: int, size: int) -> bool:
    """Return True if `rank` is on the side that sends requests; rank 0 answers.

    Raises:
        ConfigError: the graph is not bipartite.
    """
    return _active_ranks(topology, size)[rank]


def partner(topology: Topology, rank: int, size: int, step: int) -> int:
    """Return the neighbor that gets the request of `rank` at its own `step`: that graph's neighbors in turn."""
    peers = topology.peers(rank, size, step)
    near = sorted({*peers.dst, *peers.src}) or neighbours(topology, rank, size)
    return near[step // topology.period(size) % len(near)]


def check_bipartite(topology: Topology, size: int) -> None:
    """Check that a graph is connected and bipartite.

    Raises:
        ConfigError: it is not; the error names two ranks.
    """
    topology.check(size)
    _active_ranks(topology, size)


@lru_cache(maxsize=256)
def _adjacency(topology: Topology, size: int) -> tuple[tuple[int, ...], ...]:
    """Return every rank's neighbors, over all steps of a period and in both directions."""
    near: list[set[int]] = [set() for _ in range(size)]
    for step in range(topology.period(size)):
        for rank in range(size):
            for other in topology.peers(rank, size, step).dst:
                near[rank].add(other)
                near[other].add(rank)
    return tuple(tuple(sorted(each)) for each in near)


@lru_cache(maxsize=256)
def _active_ranks(topology: Topology, size: int) -> tuple[bool, ...]:
    """Return for each rank whether its distance from rank 0 is odd, by breadth-first search."""
    graph, active = _adjacency(topology, size), {0: False}
    queue = [0]
    for rank in queue:
        fresh = [other for other in graph[rank] if other not in active]
        active |= dict.fromkeys(fresh, not active[rank])
        queue += fresh
    if len(active) < size:
        apart = min(set(range(size)) - active.keys())
        raise ConfigError(f"{topology} with {size} workers: no message travels between ranks 0 and {apart}")
    for one, near in enumerate(graph):
        for other in near:
            if active[one] == active[other]:
                raise ConfigError(
                    f"{topology} with {size} workers: ranks {one} and {other} share an edge on the same side, so the "
                    "graph is not bipartite. Use BipartiteExponential() and an even number of workers"
                )
    return tuple(active[rank] for rank in range(size))
