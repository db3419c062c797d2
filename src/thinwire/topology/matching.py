"""Random pairs, drawn anew at every step and equal on all ranks."""

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from thinwire.errors import ConfigError
from thinwire.topology.base import Peers, Topology, uniform
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class RandomMatching(Topology):
    """One random partner a step; with an odd number of workers one of them has none.

    Both partners take their average: symmetric at every step, one vector sent per worker and step. Who meets whom
    follows from the seed, the number of workers and the step alone, by a hash, so that nobody need be told. The draws
    repeat after `draws` steps.

    Boyd, Ghosh, Prabhakar and Shah, Randomized Gossip Algorithms, IEEE Transactions on Information Theory 52(6), 2006,
    with as many pairs at once as there can be.

    Args:
        seed: another one draws other pairs.
        draws: matchings before they repeat, at least 1; with few the same workers meet again and again.
    """

    seed: int = 0
    draws: int = 32

    def __post_init__(self) -> None:
        """Check the kinds and the number of draws."""
        check_kinds(self)
        if self.draws < 1:
            raise ConfigError(f"draws={self.draws}: must be at least 1 matching")

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The partner of this step, if any."""
        partner = _partners(self.seed, size, step % self.draws)[rank]
        met = () if partner == rank else (partner,)
        return uniform(met, met)

    def period(self, size: int) -> int:
        """The number of draws."""
        return self.draws


@lru_cache(maxsize=4096)
def _partners(seed: int, size: int, draw: int) -> tuple[int, ...]:
    """Every rank's partner: ranks in the order of their hashes, two by two; the last of an odd number is alone."""
    order = sorted(range(size), key=lambda rank: blake2b(f"{seed},{size},{draw},{rank}".encode()).digest())
    partners = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        partners[one], partners[other] = other, one
    return tuple(partners)
