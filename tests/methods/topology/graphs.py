# SPDX-License-Identifier: Apache-2.0
"""Every graph of thinwire, the sizes it exists for, and the effect of its steps on stacked vectors."""

from __future__ import annotations

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


def mixings(topology: Topology, n: int) -> list[Matrix]:
    """The mixing matrices of a period."""
    return [topology.matrix(n, step) for step in range(topology.period(n))]


def product(topology: Topology, n: int) -> Matrix:
    """The product of a period's mixing matrices."""
    mixed = np.eye(n)
    for mixing in mixings(topology, n):
        mixed = mixing @ mixed
    return mixed
