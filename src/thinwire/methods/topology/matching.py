# SPDX-License-Identifier: Apache-2.0
"""Random pairs, drawn at every step, equal on all ranks without a message."""

from functools import lru_cache
from hashlib import blake2b

from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Peers, Topology, uniform
from thinwire.registry import registered


@registered
class RandomMatching(Topology):
    """One random partner a step; with an odd number of workers one of them has none.

    Both partners take their average: symmetric at every step, one vector sent per worker and step. The pairs are
    computed by a hash of the seed, the number of workers and the step, so every rank knows them without a message. They
    repeat after `draws` steps.

    Boyd, Ghosh, Prabhakar and Shah, Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), 2006,
    with as many pairs at once as possible.

    Args:
        seed: of the hash.
        draws: matchings before they repeat, at least 1; with few, the same pairs average again and again.

    Example:
        >>> [RandomMatching(seed=1).peers(rank=0, size=8, step=step).dst for step in range(3)]
        [(5,), (2,), (4,)]
    """

    seed: int = 0
    draws: int = 32

    def __post_init__(self) -> None:
        """Check the types and the number of draws."""
        if self.draws < 1:
            raise ConfigError(f"draws={self.draws}: must be at least 1 matching")

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The partner of this step, if any."""
        partner = _partners(self.seed, size, step % self.draws)[rank]
        near = () if partner == rank else (partner,)
        return uniform(near, near)

    def period(self, size: int) -> int:
        """The number of draws."""
        return self.draws


@lru_cache(maxsize=4096)
def _partners(seed: int, size: int, draw: int) -> tuple[int, ...]:
    """Every rank's partner: ranks in the order of their hashes, in pairs; the last of an odd number has none."""
    # A hash and no random generator: pairs must be the same in every process and every version of a library.
    order = sorted(range(size), key=lambda rank: blake2b(f"{seed},{size},{draw},{rank}".encode()).digest())
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)
