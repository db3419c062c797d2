"""What a graph of workers is: who sends to whom at each step, and with which weights."""

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from laconic.errors import ConfigError


class Peers(NamedTuple):
    """One rank's part in one step of a topology.

    Attributes:
        to: the ranks it sends to.
        frm: the ranks it receives from.
        own: the weight of its own vector.
        weights: the weights of the vectors it receives, in the order of `frm`.
    """

    to: tuple[int, ...]
    frm: tuple[int, ...]
    own: float
    weights: tuple[float, ...]


class Topology(ABC):
    """A time-varying weighted graph, as a pure function; subclasses are frozen dataclasses."""

    @abstractmethod
    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Whom `rank` speaks to at `step`; equal on every rank that asks."""

    def period(self, size: int) -> int:
        """After how many steps the graph repeats."""
        return 1

    def check(self, size: int) -> None:
        """Refuse a number of workers that the graph does not exist for.

        Raises:
            ConfigError: with the sizes that work.
        """

    def matrix(self, size: int, step: int) -> NDArray[np.float64]:
        """The mixing matrix W of one step: row i holds the weights that make worker i's next vector."""
        mixing = np.zeros((size, size))
        for rank in range(size):
            peers = self.peers(rank, size, step)
            mixing[rank, rank] += peers.own
            for source, weight in zip(peers.frm, peers.weights, strict=True):
                mixing[rank, source] += weight
        return mixing


@lru_cache(maxsize=256)
def doubly_stochastic(topology: Topology, size: int) -> bool:
    """Whether every step keeps the plain average: rows and columns of each mixing matrix sum to one."""
    matrices = [topology.matrix(size, step) for step in range(topology.period(size))]
    return all(np.allclose(m.sum(axis), 1.0, rtol=0, atol=1e-12) for m in matrices for axis in (0, 1))


def check_edges(topology: Topology, size: int) -> None:
    """Refuse a graph whose ends disagree or that never connects everyone.

    Raises:
        ConfigError: a message is sent that nobody expects, a self-loop, mass that is not conserved, or two workers
            between whom nothing ever travels.
    """
    topology.check(size)
    reach = np.eye(size, dtype=bool)
    for step in range(topology.period(size)):
        seen = [topology.peers(rank, size, step) for rank in range(size)]
        sent = {(rank, j) for rank, peers in enumerate(seen) for j in peers.to}
        expected = {(j, rank) for rank, peers in enumerate(seen) for j in peers.frm}
        if sent != expected or any(i == j for i, j in sent):
            odd = sorted(sent ^ expected or {e for e in sent if e[0] == e[1]})[0]
            raise ConfigError(f"{topology}: at step {step} the edge {odd[0]} -> {odd[1]} exists at one end only")
        columns = topology.matrix(size, step).sum(0)
        if not np.allclose(columns, 1.0, rtol=0, atol=1e-9):
            rank = int(np.argmax(np.abs(columns - 1)))
            raise ConfigError(
                f"{topology}: rank {rank} gives away {columns[rank]:.6g} of its vector at step {step}; "
                "what it keeps and sends must sum to 1"
            )
        for i, j in sent:
            reach[j, i] = True
    closure = np.linalg.matrix_power(reach.astype(np.float64), max(size, 1)) > 0
    if not closure.all():
        j, i = (int(k) for k in np.argwhere(~closure)[0])
        raise ConfigError(f"{topology} with {size} workers: nothing ever travels from rank {i} to rank {j}")
