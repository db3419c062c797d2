"""Two sides of a graph: those who ask for an exchange, and those who answer.

A worker that waits for an answer and is itself asked by others can close a circle of workers that all wait. Where only
one side asks and only the other answers, there is no circle.
"""

from collections.abc import Iterable
from functools import lru_cache

from thinwire.errors import ConfigError
from thinwire.topology.base import Topology


def neighbours(topology: Topology, rank: int, size: int) -> tuple[int, ...]:
    """All ranks with whom `rank` ever shares an edge, in either direction."""
    return _graph(topology, size)[rank]


def asks(topology: Topology, rank: int, size: int) -> bool:
    """Whether `rank` is on the side that asks; rank 0 is on the one that answers.

    Raises:
        ConfigError: the graph has no two such sides.
    """
    return _sides(topology, size)[rank]


def partner(topology: Topology, rank: int, size: int, step: int) -> int:
    """Whom `rank` asks at its own `step`: its neighbours of that step's graph in turn."""
    peers = topology.peers(rank, size, step)
    near = sorted({*peers.dst, *peers.src}) or neighbours(topology, rank, size)
    return near[step // topology.period(size) % len(near)]


def check_sides(topology: Topology, size: int) -> None:
    """Refuse a graph that is not connected, or whose workers cannot be put on two sides.

    Raises:
        ConfigError: with two ranks that show it.
    """
    topology.check(size)
    _sides(topology, size)


@lru_cache(maxsize=256)
def _graph(topology: Topology, size: int) -> tuple[tuple[int, ...], ...]:
    near: list[set[int]] = [set() for _ in range(size)]
    for step in range(topology.period(size)):
        for rank in range(size):
            for other in topology.peers(rank, size, step).dst:
                near[rank].add(other)
                near[other].add(rank)
    return tuple(tuple(sorted(each)) for each in near)


@lru_cache(maxsize=256)
def _sides(topology: Topology, size: int) -> tuple[bool, ...]:
    """For each rank whether it is an odd number of edges away from rank 0."""
    graph, bipartition = _graph(topology, size), {0: False}
    reached = [0]
    for rank in reached:
        fresh = [other for other in graph[rank] if other not in bipartition]
        bipartition |= dict.fromkeys(fresh, not bipartition[rank])
        reached += fresh
    if len(bipartition) < size:
        apart = min(set(range(size)) - bipartition.keys())
        raise ConfigError(f"{topology} with {size} workers: nothing ever travels between ranks 0 and {apart}")
    for one, other in _same_side(graph, bipartition):
        raise ConfigError(
            f"{topology} with {size} workers: ranks {one} and {other} share an edge on the same side; of two who "
            "exchange, one must ask and the other answer. Use BipartiteExponential() and an even number of workers"
        )
    return tuple(bipartition[rank] for rank in range(size))


def _same_side(graph: tuple[tuple[int, ...], ...], bipartition: dict[int, bool]) -> Iterable[tuple[int, int]]:
    return ((one, other) for one, near in enumerate(graph) for other in near if bipartition[one] == bipartition[other])
