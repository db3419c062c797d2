# SPDX-License-Identifier: Apache-2.0
"""The base class of topologies: which rank sends to which at each step, and with which weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thinwire.errors import ConfigError
from thinwire.registry import Recipe


class Peers(NamedTuple):
    """One rank's edges in one step of a topology.

    Attributes:
        dst: the ranks it sends to.
        src: the ranks it receives from.
        own: the weight of its own vector.
        weights: the weights of the vectors it receives, in the order of `src`.
    """

    dst: tuple[int, ...]
    src: tuple[int, ...]
    own: float
    weights: tuple[float, ...]


Weights = Literal["metropolis", "push-sum", "uniform"]


def uniform(dst: tuple[int, ...], src: tuple[int, ...]) -> Peers:
    """Return equal weights for the own and all received vectors; all ranks need equally many peers."""
    share = 1.0 / (len(src) + 1)
    return Peers(dst, src, share, (share,) * len(src))


def weighted(rank: int, dst: Sequence[tuple[int, ...]], src: Sequence[tuple[int, ...]], weights: Weights) -> Peers:
    r"""Return a rank's peers in a graph where ranks may have different numbers of peers.

    Rank $i$ sends to $d_i$ ranks and receives from $s_i$ ranks. For an edge, $W_{ij}$ is

    - $1 / (1 + \max(d_i, d_j))$ for "metropolis" (Metropolis-Hastings: symmetric and doubly stochastic, for edges that
      go both ways);
    - $1 / (1 + d_j)$ for "push-sum" (column-stochastic: each rank splits its own vector evenly);
    - $1 / (1 + s_i)$ for "uniform" (row-stochastic).

    Args:
        rank: the rank whose peers are returned.
        dst: for every rank, the ranks it sends to.
        src: for every rank, the ranks it receives from.
        weights: the rule.
    """
    degree = len(dst[rank])
    if weights == "uniform":
        return uniform(dst[rank], src[rank])
    if weights == "push-sum":
        return Peers(dst[rank], src[rank], 1.0 / (degree + 1), tuple(1.0 / (len(dst[j]) + 1) for j in src[rank]))
    shares = tuple(1.0 / (max(degree, len(dst[j])) + 1) for j in src[rank])
    return Peers(dst[rank], src[rank], 1.0 - sum(shares), shares)


class Topology(Recipe, ABC):
    """A time-varying weighted graph, as a pure function; subclasses are frozen dataclasses.

    Example:
        A directed ring, in which every rank sends to the next one:

        >>> from dataclasses import dataclass
        >>> from thinwire.methods.topology import Peers, Topology
        >>> @dataclass(frozen=True)
        ... class DirectedRing(Topology):
        ...     def peers(self, rank, size, step):
        ...         return Peers(dst=((rank + 1) % size,), src=((rank - 1) % size,), own=0.5, weights=(0.5,))
        >>> DirectedRing().matrix(size=3, step=0).tolist()
        [[0.5, 0.0, 0.5], [0.5, 0.5, 0.0], [0.0, 0.5, 0.5]]
    """

    @abstractmethod
    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the edges of `rank` at `step`; the answer is the same on every rank."""

    def period(self, size: int) -> int:
        """Return the number of steps after which the graph repeats."""
        return 1

    def check(self, size: int) -> None:
        """Check that the graph exists for a number of workers.

        Raises:
            ConfigError: it does not; the error lists the sizes that work.
        """

    def matrix(self, size: int, step: int) -> NDArray[np.float64]:
        """Return the mixing matrix W of one step: row i has the weights of worker i's next vector."""
        mixing = np.zeros((size, size))
        for rank in range(size):
            peers = self.peers(rank, size, step)
            mixing[rank, rank] += peers.own
            for source, weight in zip(peers.src, peers.weights, strict=True):
                mixing[rank, source] += weight
        return mixing


@lru_cache(maxsize=256)
def doubly_stochastic(topology: Topology, size: int) -> bool:
    """Return True if every step preserves the plain average: all rows and columns sum to one."""
    # Computed from the edges, since matrices of thousands of workers would take gigabytes.
    steps = ([topology.peers(rank, size, step) for rank in range(size)] for step in range(topology.period(size)))
    sums = (total for everyone in steps for total in (_kept(everyone), _given(everyone)))
    return all(np.allclose(each, 1.0, rtol=0, atol=1e-12) for each in sums)


def check_size(topology: Topology, size: int, *, most_workers: int = 4096, most_messages: int = 1 << 16) -> None:
    """Check that a graph is small enough to be analyzed in a few seconds; training has no such limit.

    Args:
        topology: the graph.
        size: the number of workers.
        most_workers: the largest number of workers.
        most_messages: the largest number of messages of all workers in a period.

    Raises:
        ConfigError: the graph is too large; the error has the limit.
    """
    # Checked before any method of the graph: its period or one rank's peers may take long for many workers.
    if size > most_workers:
        raise ConfigError(
            f"{topology} with {size} workers: too large to be analyzed. Use at most {most_workers} workers"
        )
    topology.check(size)
    steps = range(topology.period(size))
    messages = size * max(len(steps), sum(len(topology.peers(0, size, step).dst) for step in steps))
    if messages > most_messages:
        raise ConfigError(
            f"{topology} with {size} workers: about {messages:,} messages in {len(steps)} step(s), too many to be "
            f"analyzed. Use fewer workers, for at most {most_messages:,} messages"
        )


@lru_cache(maxsize=256)
def check_edges(topology: Topology, size: int) -> None:
    """Check that a graph has consistent edges and connects all workers over its period.

    Raises:
        ConfigError: a message has no receiver or no sender, an edge is a self-loop, a weight is not positive, mass is
            not conserved, or no message travels between two workers, even through others.
    """
    topology.check(size)
    sends = np.zeros((size, size), dtype=bool)
    for step in range(topology.period(size)):
        everyone = [topology.peers(rank, size, step) for rank in range(size)]
        error = _edge_error(everyone) or _share_error(_given(everyone))
        if error is not None:
            raise ConfigError(f"{topology} with {size} workers, step {step}: {error}")
        for rank, peers in enumerate(everyone):
            sends[rank, list(peers.src)] = True
    for i, j in out_of_reach(sends):
        raise ConfigError(
            f"{topology} with {size} workers: no message travels from rank {i} to rank {j}. Add edges until every "
            "rank is reached, or use a graph that connects any number of workers, such as Ring()"
        )


def _edge_error(everyone: list[Peers]) -> str | None:
    """Return the problem of one step's edges as text, or None; `everyone` has each rank's peers."""
    sent = [(rank, j) for rank, peers in enumerate(everyone) for j in peers.dst]
    expected = [(j, rank) for rank, peers in enumerate(everyone) for j in peers.src]
    edges = set(sent)
    for i, j in sorted(edges ^ set(expected)):
        return f"the edge {i} -> {j} exists at one end only"
    for i in (i for i, j in edges if i == j):
        return f"rank {i} sends to itself: the share that it keeps is its own weight"
    if max(len(sent), len(expected)) > len(edges):
        return "an edge exists twice: use one edge with the sum of the weights"
    for rank, peers in enumerate(everyone):
        if len(peers.weights) != len(peers.src):
            return f"rank {rank} has {len(peers.weights)} weights for {len(peers.src)} received vectors"
        if not min(peers.own, *peers.weights, 1.0) > 0:
            return f"rank {rank} mixes with weights {(peers.own, *peers.weights)}: every weight must be positive"
    return None


def _kept(everyone: list[Peers]) -> NDArray[np.float64]:
    """Return the sum of the weights that each rank mixes with."""
    return np.array([peers.own + sum(peers.weights) for peers in everyone])


def _given(everyone: list[Peers]) -> NDArray[np.float64]:
    """Return the sum of the shares of each rank's vector that it keeps and sends."""
    shares = np.array([peers.own for peers in everyone])
    for peers in everyone:
        np.add.at(shares, list(peers.src), peers.weights)
    return shares


def _share_error(columns: NDArray[np.float64]) -> str | None:
    """Return the first rank whose shares do not sum to one, as text; None if all do."""
    rank = int(np.argmax(np.abs(columns - 1)))
    if abs(columns[rank] - 1) <= 1e-9:
        return None
    return f"rank {rank} keeps and sends {columns[rank]:.6g} of its vector: the shares must sum to 1"


def out_of_reach(sends: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yield pairs of ranks, one of them 0, where no message from the first ever reaches the second.

    Every rank reaches every other if rank 0 reaches all and all reach rank 0, so only these pairs are checked.

    Args:
        sends: `sends[j, i]` is true if i ever sends to j.
    """
    yield from ((0, int(j)) for j in np.flatnonzero(~_reached(sends)))
    yield from ((int(i), 0) for i in np.flatnonzero(~_reached(sends.T)))


def _reached(sends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the ranks that messages of rank 0 reach; `sends[j, i]` is true if i ever sends to j."""
    reached = newly = np.arange(len(sends)) == 0
    while newly.any():
        newly = sends[:, newly].any(1) & ~reached
        reached = reached | newly
    return reached
