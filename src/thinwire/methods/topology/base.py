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
    """Equal weights for the own vector and all received ones; for graphs where all ranks have equally many peers."""
    share = 1.0 / (len(src) + 1)
    return Peers(dst, src, share, (share,) * len(src))


def weighted(rank: int, dst: Sequence[tuple[int, ...]], src: Sequence[tuple[int, ...]], weights: Weights) -> Peers:
    r"""One rank's peers in a graph where ranks may have different numbers of them.

    With $d_i$ the number of ranks that $i$ sends to, $W_{ij}$ is $1 / (1 + \max(d_i, d_j))$ for "metropolis"
    (Metropolis-Hastings: symmetric and doubly stochastic, for edges that go both ways), $1 / (1 + d_j)$ for "push-sum"
    (column-stochastic: each rank splits its own vector evenly), and for "uniform" one over one more than the number of
    ranks that $i$ receives from (row-stochastic).

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
        """The edges of `rank` at `step`; every rank that calls this gets the same answer."""

    def period(self, size: int) -> int:
        """The number of steps after which the graph repeats."""
        return 1

    def check(self, size: int) -> None:
        """Refuse a number of workers for which the graph does not exist.

        Raises:
            ConfigError: with the sizes that work.
        """

    def matrix(self, size: int, step: int) -> NDArray[np.float64]:
        """The mixing matrix W of one step: row i holds the weights of worker i's next vector."""
        mixing = np.zeros((size, size))
        for rank in range(size):
            peers = self.peers(rank, size, step)
            mixing[rank, rank] += peers.own
            for source, weight in zip(peers.src, peers.weights, strict=True):
                mixing[rank, source] += weight
        return mixing


@lru_cache(maxsize=256)
def doubly_stochastic(topology: Topology, size: int) -> bool:
    """Whether every step keeps the plain average: rows and columns of each mixing matrix sum to one."""
    # By the edges, as matrices of thousands of workers would take gigabytes.
    steps = ([topology.peers(rank, size, step) for rank in range(size)] for step in range(topology.period(size)))
    sums = (total for everyone in steps for total in (_kept(everyone), _given(everyone)))
    return all(np.allclose(each, 1.0, rtol=0, atol=1e-12) for each in sums)


def check_size(topology: Topology, size: int, *, most_workers: int = 4096, most_messages: int = 1 << 16) -> None:
    """Refuse a graph that is too large to be looked at as a whole in a few seconds; workers may train on it.

    Args:
        topology: the graph.
        size: number of workers.
        most_workers: the largest number of them.
        most_messages: over all workers and all steps of a period.

    Raises:
        ConfigError: with the number, and the largest that is looked at.
    """
    # Before any method of the graph: its period or one rank's peers may take long for many workers.
    if size > most_workers:
        raise ConfigError(
            f"{topology} with {size} workers: too large to be looked at as a whole; give at most {most_workers} workers"
        )
    topology.check(size)
    steps = range(topology.period(size))
    messages = size * max(len(steps), sum(len(topology.peers(0, size, step).dst) for step in steps))
    if messages > most_messages:
        raise ConfigError(
            f"{topology} with {size} workers: about {messages:,} messages in {len(steps)} step(s), too many to be "
            f"looked at as a whole; give fewer workers, for at most {most_messages:,}"
        )


@lru_cache(maxsize=256)
def check_edges(topology: Topology, size: int) -> None:
    """Refuse a graph with inconsistent edges, or one that does not connect all workers over its period.

    Raises:
        ConfigError: a message is sent that no rank expects, a self-loop, a weight that is not positive, mass that is
            not conserved, or two workers between which no message ever travels, even through others.
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
            f"{topology} with {size} workers: nothing ever travels from rank {i} to rank {j}; add edges until every "
            "rank is reached, or use a graph that connects any number of workers, such as Ring()"
        )


def _edge_error(everyone: list[Peers]) -> str | None:
    """What is wrong with the edges of one step, as text; `everyone` holds each rank's peers."""
    sent = [(rank, j) for rank, peers in enumerate(everyone) for j in peers.dst]
    expected = [(j, rank) for rank, peers in enumerate(everyone) for j in peers.src]
    edges = set(sent)
    for i, j in sorted(edges ^ set(expected)):
        return f"the edge {i} -> {j} exists at one end only"
    for i in (i for i, j in edges if i == j):
        return f"rank {i} sends to itself; what it keeps is its own weight"
    if max(len(sent), len(expected)) > len(edges):
        return "an edge exists twice; use one edge with the sum of their weights"
    for rank, peers in enumerate(everyone):
        if len(peers.weights) != len(peers.src):
            return f"rank {rank} has {len(peers.weights)} weights for {len(peers.src)} vectors it receives"
        if not min(peers.own, *peers.weights, 1.0) > 0:
            return f"rank {rank} mixes with weights {(peers.own, *peers.weights)}; every weight must be positive"
    return None


def _kept(everyone: list[Peers]) -> NDArray[np.float64]:
    """The sum of the weights that each rank mixes with."""
    return np.array([peers.own + sum(peers.weights) for peers in everyone])


def _given(everyone: list[Peers]) -> NDArray[np.float64]:
    """The sum of the shares of each rank's vector that it keeps and sends."""
    shares = np.array([peers.own for peers in everyone])
    for peers in everyone:
        np.add.at(shares, list(peers.src), peers.weights)
    return shares


def _share_error(columns: NDArray[np.float64]) -> str | None:
    """The rank whose kept and sent shares do not sum to one, as text; None where there is none."""
    rank = int(np.argmax(np.abs(columns - 1)))
    if abs(columns[rank] - 1) <= 1e-9:
        return None
    return f"rank {rank} gives away {columns[rank]:.6g} of its vector; what it keeps and sends must sum to 1"


def out_of_reach(sends: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Pairs of ranks, one of them 0, such that nothing from the first ever reaches the second, even through others.

    Every rank reaches every other if rank 0 reaches all and all reach rank 0, so only these pairs are tried.

    Args:
        sends: `sends[j, i]` is true where i ever sends to j.
    """
    yield from ((0, int(j)) for j in np.flatnonzero(~_reached(sends)))
    yield from ((int(i), 0) for i in np.flatnonzero(~_reached(sends.T)))


def _reached(sends: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which ranks messages of rank 0 reach in the end; `sends[j, i]` is true where i ever sends to j."""
    reached = newly = np.arange(len(sends)) == 0
    while newly.any():
        newly = sends[:, newly].any(1) & ~reached
        reached = reached | newly
    return reached
