# SPDX-License-Identifier: Apache-2.0
"""Random pairs at every step, equal on all ranks without a message."""

from functools import lru_cache
from hashlib import blake2b
from typing import Annotated

from thinwire.core.validation import Range
from thinwire.methods.topology.base import Peers, Topology, uniform
from thinwire.registry import registered


@registered
class RandomMatching(Topology):
    """Pair workers at random at each step; with an odd number of workers one has no partner.

    Both partners compute their average: symmetric at every step, one vector sent per worker and step. A hash of the
    seed, the number of workers and the step gives the pairs, so every rank knows them without a message. They repeat
    after `draws` steps.

    Boyd, Ghosh, Prabhakar and Shah, Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), 2006,
    with as many pairs at once as possible.

    Args:
        seed: the seed of the hash.
        draws: matchings before they repeat, at least 1; if there are few, the same pairs average repeatedly.

    Example:
        >>> [RandomMatching(seed=1).peers(rank=0, size=8, step=step).dst for step in range(3)]
        [(5,), (2,), (4,)]
    """

    seed: int = 0
    draws: Annotated[int, Range("1..", "32 is usual")] = 32

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the partner of this step, if any."""
        partner = _partners(self.seed, size, step % self.draws)[rank]
        near = () if partner == rank else (partner,)
        return uniform(near, near)

    def period(self, size: int) -> int:
        """Return the number of draws."""
        return self.draws


@lru_cache(maxsize=4096)
def _partners(seed: int, size: int, draw: int) -> tuple[int, ...]:
    """Pair the ranks in the order of their hashes; the last of an odd number has no partner."""
    # A hash instead of a random generator: pairs must be the same in every process and library version.
    order = sorted(range(size), key=lambda rank: blake2b(f"{seed},{size},{draw},{rank}".encode()).digest())
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)
