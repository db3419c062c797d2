"""To whom: pure functions of (rank, size, step)."""

from laconic.topology.base import Peers, Topology
from laconic.topology.base_graph import BaseGraph
from laconic.topology.custom import FromGraph
from laconic.topology.exponential import (
    BipartiteExponential,
    DirectedExponential,
    PPeerExponential,
    SymmetricExponential,
)
from laconic.topology.graphs import Complete, Hierarchical, Hypercube, OnePeerExponential, Ring, Star, Torus
from laconic.topology.matching import RandomMatching

__all__ = [
    "BaseGraph",
    "BipartiteExponential",
    "Complete",
    "DirectedExponential",
    "FromGraph",
    "Hierarchical",
    "Hypercube",
    "OnePeerExponential",
    "PPeerExponential",
    "Peers",
    "RandomMatching",
    "Ring",
    "Star",
    "SymmetricExponential",
    "Topology",
    "Torus",
]
