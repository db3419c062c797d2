# SPDX-License-Identifier: Apache-2.0
"""Random events of the network and the workers: each draw has a seed and an owner of its own."""

from __future__ import annotations

from random import Random

from thinwire.planning.simulate.durations import Duration
from thinwire.planning.simulate.network import Network


class Draws:
    """The random numbers of one run; those of one worker do not depend on what the others do.

    Args:
        network: what is drawn.
        workers: how many.
        seed: of all draws.
        compute_time: how long a step computes, instead of the network's.
    """

    def __init__(self, network: Network, workers: int, seed: int, compute_time: Duration | None = None) -> None:
        self._network = network
        self._compute = compute_time or network.compute or Duration()
        self._slowdown = network.slowdowns(workers)
        self._for_compute = [Random(f"thinwire/{seed}/compute/{rank}") for rank in range(workers)]
        self._for_messages = [Random(f"thinwire/{seed}/messages/{rank}") for rank in range(workers)]

    def compute_seconds(self, rank: int) -> float:
        """Return how long a worker computes in its next step."""
        return self._compute.draw(self._for_compute[rank]) * self._slowdown[rank]

    def slowdown(self, rank: int) -> float:
        """Return how many times as long a worker computes as others."""
        return self._slowdown[rank]

    def variation(self, rank: int) -> float:
        """Return a factor of mean 1 of what a worker computes in its next step."""
        spread = self._network.spread
        return self._for_compute[rank].lognormvariate(-spread * spread / 2, spread) if spread else 1.0

    def message_delay(self, src: int) -> float:
        """Return by how much a worker's next message to a single rank is delayed; most often zero."""
        if not self._network.delayed:
            return 0.0
        random = self._for_messages[src]
        late, delay = random.random() < self._network.delayed, self._network.delay.draw(random)
        return delay if late else 0.0
