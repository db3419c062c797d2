"""The graphs: each a few lines of arithmetic, valid for every number of workers unless it says otherwise."""

from dataclasses import dataclass

from laconic.errors import ConfigError
from laconic.topology.base import Peers, Topology


def uniform(to: tuple[int, ...], frm: tuple[int, ...]) -> Peers:
    """Everyone keeps and sends equal shares; right where all ranks have equally many peers."""
    share = 1.0 / (len(frm) + 1)
    return Peers(to, frm, share, (share,) * len(frm))


@dataclass(frozen=True)
class Ring(Topology):
    """Both neighbours on a circle, at every step; the sparsest symmetric graph, and the slowest to agree."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The ranks before and after; the same one twice is one."""
        neighbours = tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank}))
        return uniform(neighbours, neighbours)


@dataclass(frozen=True)
class Complete(Topology):
    """Everyone with everyone: the exact average in one step, at (n-1) vectors sent per worker."""

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """All other ranks."""
        others = tuple(j for j in range(size) if j != rank)
        return uniform(others, others)


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """One peer a step, 1, 2, 4, ... places ahead in turn.

    With a power of two workers, log2(n) steps reach the exact average; with any other number they come close
    (what is left after a period is at most a quarter). One vector sent per worker and step, at any size.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792.
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The rank 2**(step mod period) ahead; the one as far behind sends to us."""
        if size == 1:
            return uniform((), ())
        hop = 1 << (step % self.period(size))
        return uniform(((rank + hop) % size,), ((rank - hop) % size,))

    def period(self, size: int) -> int:
        """The number of hops shorter than the circle."""
        return max(1, (size - 1).bit_length())


@dataclass(frozen=True)
class Hypercube(Topology):
    """One partner a step, across one dimension of a cube in turn: the exact average every log2(n) steps.

    Symmetric, so that it also suits methods that ask for symmetric weights. Needs a power of two workers.
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The rank that differs in one bit."""
        if size == 1:
            return uniform((), ())
        partner = rank ^ (1 << (step % self.period(size)))
        return uniform((partner,), (partner,))

    def period(self, size: int) -> int:
        """The number of dimensions."""
        return max(1, (size - 1).bit_length())

    def check(self, size: int) -> None:
        """Refuse any size that is no power of two."""
        if size & (size - 1):
            below = 1 << (size.bit_length() - 1)
            raise ConfigError(
                f"Hypercube() with {size} workers: needs a power of two; use {below} or {2 * below} workers, "
                "or OnePeerExponential(), which exists for any number"
            )
