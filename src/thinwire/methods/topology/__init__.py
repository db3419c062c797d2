# SPDX-License-Identifier: Apache-2.0
"""Topologies: graphs of workers, as pure functions of (rank, size, step)."""

from thinwire.methods.topology.base import Peers, Topology

__all__ = ["Peers", "Topology"]
