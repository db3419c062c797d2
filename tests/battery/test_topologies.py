# SPDX-License-Identifier: Apache-2.0
"""Every registered topology is asked the same questions, for one to twelve workers and two larger numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.battery.cases import TOPOLOGIES
from tests.methods.topology.graphs import exists
from thinwire import ConfigError, FromGraph, Topology
from thinwire.methods.topology.base import check_edges, doubly_stochastic

SIZES = (*range(1, 13), 16, 36)
EVERY = pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
pytestmark = pytest.mark.every_case
MOVE_THE_AVERAGE = ("Star(weights='push-sum')",)


def sizes_of(topology: Topology) -> set[int]:
    """The numbers of workers that a graph exists for."""
    if isinstance(topology, FromGraph):
        return {topology.workers}
    return {size for size in SIZES if exists(topology, size)}


@EVERY
def test_a_number_of_workers_is_accepted_or_refused_in_words(topology: Topology) -> None:
    for size in SIZES:
        if size in sizes_of(topology):
            check_edges(topology, size)
            continue
        with pytest.raises(ConfigError) as found:
            check_edges(topology, size)
        assert re.search(rf"\b{size}\b.*(; use|\. Use|; start|\. Start) ", str(found.value))


@EVERY
def test_both_ends_of_every_edge_agree_on_it(topology: Topology) -> None:
    for size in sizes_of(topology):
        for step in range(topology.period(size)):
            ranks = [topology.peers(rank, size, step) for rank in range(size)]
            sent = [(rank, other) for rank, peers in enumerate(ranks) for other in peers.dst]
            received = [(other, rank) for rank, peers in enumerate(ranks) for other in peers.src]
            assert sorted(sent) == sorted(received)
            assert len(set(sent)) == len(sent)
            assert all(i != j and 0 <= j < size for i, j in sent)
            assert all(len(peers.src) == len(peers.weights) for peers in ranks)


@EVERY
def test_every_worker_splits_its_whole_vector_and_the_average_is_kept_where_it_is_claimed(topology: Topology) -> None:
    for size in sizes_of(topology):
        keeps = repr(topology) not in MOVE_THE_AVERAGE or size <= 2
        assert doubly_stochastic(topology, size) == keeps
        for step in range(topology.period(size)):
            ranks = [topology.peers(rank, size, step) for rank in range(size)]
            mixing = np.diag([peers.own for peers in ranks])
            for rank, peers in enumerate(ranks):
                mixing[rank, list(peers.src)] += peers.weights
            assert np.array_equal(topology.matrix(size, step), mixing)
            assert (np.diag(mixing) > 0).all() and (mixing >= 0).all()
            assert np.abs(mixing.sum(0) - 1).max() < 1e-14
            assert (np.abs(mixing.sum(1) - 1).max() < 1e-14) or not keeps


@EVERY
def test_it_repeats_after_its_period(topology: Topology) -> None:
    for size in sizes_of(topology):
        period = topology.period(size)
        for rank in range(size):
            for step in (0, 1, 5, 1000):
                assert topology.peers(rank, size, step) == topology.peers(rank, size, step + period)


@EVERY
def test_every_period_connects_all_workers(topology: Topology) -> None:
    for size in sizes_of(topology):
        reach = np.eye(size)
        for _ in range(size):
            for step in range(topology.period(size)):
                reach = np.minimum(1, (topology.matrix(size, step) > 0) @ reach)
        assert reach.all()
