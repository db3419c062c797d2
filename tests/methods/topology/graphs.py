# SPDX-License-Identifier: Apache-2.0
"""Every graph of thinwire, the sizes it exists for, and the effect of its steps on stacked vectors."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from thinwire import (
    BaseGraph,
    BipartiteExponential,
    Complete,
    DirectedExponential,
    Hierarchical,
    Hypercube,
    OnePeerExponential,
    PPeerExponential,
    RandomMatching,
    Ring,
    Star,
    SymmetricExponential,
    Topology,
    Torus,
)
from thinwire.methods.topology.base import Peers

Matrix = NDArray[np.float64]
SIZES = range(1, 129)
KEEPING = [
    Ring(),
    Torus(),
    Star(),
    Complete(),
    Hypercube(),
    OnePeerExponential(),
    DirectedExponential(),
    SymmetricExponential(),
    SymmetricExponential(base=4),
    PPeerExponential(),
    PPeerExponential(degree=5),
    BipartiteExponential(),
    RandomMatching(seed=3, draws=8),
    BaseGraph(),
    BaseGraph(degree=2),
    BaseGraph(degree=3),
    Hierarchical(),
    Hierarchical(3, inside=Ring(), between=BaseGraph(), every=4),
]
GRAPHS = [*KEEPING, Star("push-sum")]


def exists(topology: Topology, n: int) -> bool:
    """Whether a graph exists for n workers."""
    if isinstance(topology, Hypercube):
        return n & (n - 1) == 0
    if isinstance(topology, BipartiteExponential):
        return n == 1 or n % 2 == 0
    if isinstance(topology, Hierarchical):
        return n < topology.node_size or n % topology.node_size == 0
    return True


@cache
def seen(topology: Topology, n: int) -> list[list[Peers]]:
    """Every rank's peers at every step of a period."""
    return [[topology.peers(rank, n, step) for rank in range(n)] for step in range(topology.period(n))]


def mixings(topology: Topology, n: int) -> list[Matrix]:
    """The mixing matrices of a period, from the senders in every rank's peers."""
    found: list[Matrix] = []
    for ranks in seen(topology, n):
        mixing = np.diag([peers.own for peers in ranks])
        for rank, peers in enumerate(ranks):
            mixing[rank, list(peers.src)] += peers.weights
        found.append(mixing)
    return found


def product(topology: Topology, n: int) -> Matrix:
    """The product of a period's mixing matrices."""
    mixed = np.eye(n)
    for mixing in mixings(topology, n):
        mixed = mixing @ mixed
    return mixed


def disagreement(topology: Topology, n: int) -> float:
    """The largest share of any disagreement that is left after one period."""
    return float(np.linalg.norm(product(topology, n) - 1 / n, 2))


def reaches_all(sends: NDArray[np.bool_]) -> bool:
    """Whether there is a path from every rank to every other, by squaring."""
    reach = sends | np.eye(len(sends), dtype=bool)
    for _ in range(max(1, (len(sends) - 1).bit_length())):
        reach = (reach.astype(float) @ reach) > 0
    return bool(reach.all())
