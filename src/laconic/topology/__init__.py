"""To whom: pure functions of (rank, size, step)."""

from laconic.topology.base import Peers, Topology
from laconic.topology.graphs import Complete, Hypercube, OnePeerExponential, Ring

__all__ = ["Complete", "Hypercube", "OnePeerExponential", "Peers", "Ring", "Topology"]
