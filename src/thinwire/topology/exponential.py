"""Graphs of exponentially growing hops around a circle: few messages, and news is everywhere after log(n) steps."""

from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.topology.base import Peers, Topology, uniform
from thinwire.validation import check_kinds


def powers_below(base: int, limit: int) -> list[int]:
    """1, base, base squared, ... below a limit."""
    powers = [1]
    while powers[-1] < limit:
        powers.append(powers[-1] * base)
    return powers[:-1]


def _along(rank: int, size: int, hops: set[int]) -> Peers:
    """Send as many places ahead as each hop says, and receive from as many behind."""
    ordered = sorted(hops - {0})
    return uniform(tuple((rank + hop) % size for hop in ordered), tuple((rank - hop) % size for hop in ordered))


@dataclass(frozen=True)
class DirectedExponential(Topology):
    """All peers 1, 2, 4, ... places ahead, at every step: ceil(log2 n) vectors sent per worker and step.

    Static and directed, so its eigenvalues are complex. Nothing is agreed sooner than by `OnePeerExponential`, which
    sends one vector a step, where n is a power of two.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792; Ying et al., Exponential Graph is Provably
    Efficient for Decentralized Deep Training, NeurIPS 2021, arXiv:2110.13363.
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The ranks at all hops shorter than the circle."""
        return _along(rank, size, set(powers_below(2, size)))


@dataclass(frozen=True)
class SymmetricExponential(Topology):
    """All peers 1, b, b squared, ... places away in both directions, at every step, as far as half the circle.

    Static and symmetric, so that it suits methods that ask for that, and well connected; about 2 log_b(n) vectors sent
    per worker and step.

    Yuan et al., DecentLaM, ICCV 2021, arXiv:2104.11981, mix along such a graph.

    Args:
        base: b, at least 2; a larger one has fewer peers and agrees more slowly.
    """

    base: int = 2

    def __post_init__(self) -> None:
        """Check the kinds and the base."""
        check_kinds(self)
        if self.base < 2:
            raise ConfigError(f"base={self.base}: must be at least 2; use Complete() to reach everyone")

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The ranks at all hops of at most half the circle, ahead and behind."""
        hops = powers_below(self.base, size // 2 + 1)
        near = {(rank + sign * hop) % size for hop in hops for sign in (1, -1)}
        neighbours = tuple(sorted(near - {rank}))
        return uniform(neighbours, neighbours)


@dataclass(frozen=True)
class PPeerExponential(Topology):
    r"""`degree` peers a step, $j (p+1)^i$ places ahead for j from 1 to p, with i = 0, 1, 2, ... in turn.

    A period reaches the exact average where the longest hop, taken at most p+1 times, comes back to its start: for
    $n = c (p+1)^q$ with $c \le p+1$, and for some more n if p+1 is no prime. With any other number it comes close. Hops
    that lead back to their start, or to where another leads, are left out. One peer is `OnePeerExponential`.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792.

    Args:
        degree: p, the vectors sent per worker and step; more agree in fewer steps.
    """

    degree: int = 2

    def __post_init__(self) -> None:
        """Check the kinds and the number of peers."""
        check_kinds(self)
        if self.degree < 1:
            raise ConfigError(f"degree={self.degree}: must be at least 1")

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Ranks ahead at multiples of this step's power; those as far behind send to us."""
        hops = powers_below(self.degree + 1, size) or [1]
        hop = hops[step % len(hops)]
        return _along(rank, size, {j * hop % size for j in range(1, self.degree + 1)})

    def period(self, size: int) -> int:
        """The number of powers shorter than the circle."""
        return max(1, len(powers_below(self.degree + 1, size)))


@dataclass(frozen=True)
class BipartiteExponential(Topology):
    """Pairs of an even and an odd rank, 1, -1, 3, -3, 5, -5, 9, -9, ... places apart in turn.

    All hops are odd, so that every edge joins the two sides, and both partners average with each other: symmetric at
    every step, one vector sent per worker and step. Suits methods in which one side asks and the other answers. Needs
    an even number of workers.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792, name such a graph for D-PSGD and AD-PSGD.
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """The one partner of this step."""
        if size == 1:
            return uniform((), ())
        hops = _odd_hops(size)
        hop = hops[step % len(hops)]
        partner = ((rank - hop if self.active(rank) else rank + hop) % size,)
        return uniform(partner, partner)

    def active(self, rank: int) -> bool:
        """Whether a rank is on the side that asks, the odd one; the even one is passive and answers."""
        return rank % 2 == 1

    def period(self, size: int) -> int:
        """The number of different hops."""
        return len(_odd_hops(size))

    def check(self, size: int) -> None:
        """Refuse odd numbers of workers."""
        if size > 1 and size % 2:
            raise ConfigError(
                f"BipartiteExponential() with {size} workers: needs an even number, or somebody has no partner; use "
                f"{size - 1} or {size + 1} workers, or RandomMatching() or BaseGraph(), which exist for any number"
            )


def _odd_hops(size: int) -> list[int]:
    """The hops of a circle of even length, ahead (from 0 to half of it and beyond) and each once."""
    hops = [1, *(1 + power for power in powers_below(2, size)[1:] if 1 + power < size)]
    return list(dict.fromkeys(sign * hop % size for hop in hops for sign in (1, -1)))
