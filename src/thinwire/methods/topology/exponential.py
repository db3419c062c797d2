# SPDX-License-Identifier: Apache-2.0
"""Graphs of exponentially growing hops around a circle: few messages reach all ranks in log(n) steps."""

from functools import lru_cache
from typing import Annotated, ClassVar

from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Peers, Topology, uniform
from thinwire.registry import registered


@lru_cache(maxsize=256)  # the period of a graph is asked for at every step
def powers_below(base: int, limit: int) -> tuple[int, ...]:
    """Return 1, base, base squared, ... below a limit."""
    # Multiplied out, because logarithms round: math.log(243, 3) is less than 5.
    powers = [1]
    while powers[-1] < limit:
        powers.append(powers[-1] * base)
    return tuple(powers[:-1])


def _along(rank: int, size: int, hops: set[int]) -> Peers:
    """Send to the ranks that are these hops ahead, and receive from those that are as far behind."""
    # A hop of a whole circle would be a message to itself.
    ordered = sorted(hops - {0})
    return uniform(tuple((rank + hop) % size for hop in ordered), tuple((rank - hop) % size for hop in ordered))


@registered
class DirectedExponential(Topology):
    """Send to the peers 1, 2, 4, ... ranks ahead, at every step: ceil(log2 n) vectors per worker and step.

    Static and directed, so its eigenvalues are complex. If n is a power of two, workers agree no faster than with
    `OnePeerExponential`, which sends one vector a step.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792; Ying et al., Exponential Graph is Provably
    Efficient for Decentralized Deep Training, NeurIPS 2021, arXiv:2110.13363.

    Example:
        >>> DirectedExponential().peers(rank=0, size=8, step=0).dst
        (1, 2, 4)
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks at all hops that are shorter than the circle."""
        return _along(rank, size, set(powers_below(2, size)))


@registered
class SymmetricExponential(Topology):
    """Exchange with the peers 1, b, b squared, ... ranks away in both directions, up to half the circle.

    Static, symmetric and well connected, so it works with methods that need symmetry; about 2 log_b(n) vectors sent per
    worker and step.

    Yuan et al., DecentLaM, ICCV 2021, arXiv:2104.11981, use such a graph.

    Args:
        base: b, at least 2; a larger base has fewer peers and agrees more slowly.

    Example:
        >>> SymmetricExponential().peers(rank=0, size=8, step=0).dst
        (1, 2, 4, 6, 7)
    """

    base: Annotated[int, Range("2..", "Use Complete() to reach all ranks")] = 2

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks at all hops of at most half the circle, ahead and behind."""
        hops = powers_below(self.base, size // 2 + 1)
        near = {(rank + sign * hop) % size for hop in hops for sign in (1, -1)}
        neighbours = tuple(sorted(near - {rank}))
        return uniform(neighbours, neighbours)


@registered
class PPeerExponential(Topology):
    r"""Send to `degree` = p peers per step: those $j (p+1)^i$ ranks ahead, with j = 1, ..., p, on a circle of n ranks.

    The exponent i is 0 at the first step and grows by one per step; after the largest power $(p+1)^i < n$ it starts
    again at 0. One such period gives the exact average if that largest power, as a hop repeated at most p+1 times,
    leads back to its start: for $n = c (p+1)^q$ with $c \le p+1$, and for some more n if p+1 is not prime. For other n
    the result of a period is close to the average. Hops that lead back to their start, or to the same rank as another
    hop, are left out. `OnePeerExponential()` is this graph with `degree=1`.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792.

    Args:
        degree: p, the vectors sent per worker and step; with more, workers agree in fewer steps.

    Example:
        >>> [PPeerExponential(degree=2).peers(rank=0, size=9, step=step).dst for step in range(2)]
        [(1, 2), (3, 6)]
    """

    degree: Annotated[int, Range("1..", "1 sends least")] = 2

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks j (p+1)^i ahead, for the i of this step, and those as far behind."""
        hops = powers_below(self.degree + 1, size) or (1,)
        hop = hops[step % len(hops)]
        return _along(rank, size, {j * hop % size for j in range(1, self.degree + 1)})

    def period(self, size: int) -> int:
        """Return the number of powers of p+1 that are less than the number of ranks; at least 1."""
        return max(1, len(powers_below(self.degree + 1, size)))


@registered
class OnePeerExponential(PPeerExponential):
    """Send to one peer per step, 1, 2, 4, ... ranks ahead in turn: `PPeerExponential(1)`.

    With a power of two workers, log2(n) steps reach the exact average; with any other number a period leaves at most
    25 % of any difference. One vector sent per worker and step, at any size.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792.

    Example:
        >>> [OnePeerExponential().peers(rank=0, size=8, step=step).dst for step in range(4)]
        [(1,), (2,), (4,), (1,)]
    """

    # Not a field, so that recipes do not contain it.
    degree: ClassVar[int] = 1  # pyright: ignore[reportIncompatibleVariableOverride]


@registered
class BipartiteExponential(Topology):
    """Pair an even and an odd rank, 1, -1, 3, -3, 5, -5, 9, -9, ... ranks apart in turn.

    All hops are odd, so the graph is bipartite. Both partners average with each other: symmetric at every step, one
    vector sent per worker and step. Use it for methods in which active workers send requests and passive ones answer.
    It needs an even number of workers.

    Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792, name such a graph for D-PSGD and AD-PSGD.

    Example:
        >>> [BipartiteExponential().peers(rank=0, size=8, step=step).dst for step in range(4)]
        [(1,), (7,), (3,), (5,)]
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return this step's partner."""
        if size == 1:
            return uniform((), ())
        hops = _odd_hops(size)
        hop = hops[step % len(hops)]
        partner = ((rank - hop if self.active(rank) else rank + hop) % size,)
        return uniform(partner, partner)

    def active(self, rank: int) -> bool:
        """Return True if a rank is active: odd ranks send requests, even ones answer."""
        return rank % 2 == 1

    def period(self, size: int) -> int:
        """Return the number of different hops."""
        return len(_odd_hops(size))

    def check(self, size: int) -> None:
        """Check that the number of workers is even."""
        if size > 1 and size % 2:
            raise ConfigError(
                f"BipartiteExponential() with {size} workers: needs an even number, or one worker has no partner. "
                f"Use {size - 1} or {size + 1} workers, or RandomMatching() or BaseGraph(), which exist for any number"
            )


def _odd_hops(size: int) -> list[int]:
    """Return the hops 1, -1, 3, -3, 5, ... modulo the size, each once."""
    hops = [1, *(1 + power for power in powers_below(2, size)[1:] if 1 + power < size)]
    return list(dict.fromkeys(sign * hop % size for hop in hops for sign in (1, -1)))
