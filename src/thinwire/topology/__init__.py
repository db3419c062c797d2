"""Topologies: graphs of workers, as pure functions of (rank, size, step)."""

from thinwire.topology.base import Peers, Topology
from thinwire.topology.base_graph import BaseGraph
from thinwire.topology.custom import FromGraph
from thinwire.topology.exponential import (
    BipartiteExponential,
    DirectedExponential,
    PPeerExponential,
    SymmetricExponential,
)
from thinwire.topology.graphs import Complete, Hierarchical, Hypercube, OnePeerExponential, Ring, Star, Torus
from thinwire.topology.matching import RandomMatching

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
