# SPDX-License-Identifier: Apache-2.0
"""The classic graphs, which exist for any number of workers unless stated otherwise."""

from functools import lru_cache
from math import gcd, isqrt, lcm
from typing import Annotated, Literal

from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.topology.base import Peers, Topology, uniform, weighted
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered


@registered
class Ring(Topology):
    """Exchange with both neighbors on a circle; the sparsest symmetric graph, and the slowest to agree.

    Example:
        >>> Ring().peers(rank=0, size=4, step=0).dst
        (1, 3)
        >>> Ring().matrix(size=4, step=0)[0].round(2).tolist()
        [0.33, 0.33, 0.0, 0.33]
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks before and after; with two workers these are one rank."""
        # A set, because with two workers both neighbors are the same rank.
        neighbours = tuple(sorted({(rank - 1) % size, (rank + 1) % size} - {rank}))
        return uniform(neighbours, neighbours)


@registered
class Torus(Topology):
    """Exchange with the four neighbors on a grid with joined opposite sides, as square as possible.

    The grid has as many rows as the largest divisor of n that is no larger than its square root: a prime number of
    workers is a ring. It agrees in about n steps, where a ring needs n squared. Four vectors sent per worker and step,
    two or three if a side has length one or two.

    Example:
        >>> Torus().peers(rank=0, size=16, step=0).dst
        (1, 3, 4, 12)
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the ranks to the left, to the right, above and below; on short sides two of them are one rank."""
        columns = size // _rows(size)
        row = rank - rank % columns
        near = {
            row + (rank - 1) % columns,
            row + (rank + 1) % columns,
            (rank - columns) % size,
            (rank + columns) % size,
        }
        neighbours = tuple(sorted(near - {rank}))
        return uniform(neighbours, neighbours)


@lru_cache(maxsize=256)
def _rows(size: int) -> int:
    return next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)


@registered
class Star(Topology):
    """Exchange between rank 0 and all others; rank 0 sends and receives n-1 vectors a step.

    Args:
        weights: "metropolis" preserves the plain average, and agrees in about n steps. With "push-sum" every rank
            splits its vector evenly, which agrees in a few steps and needs `PushSum` to remove the bias.

    Example:
        >>> Star().peers(rank=0, size=4, step=0).dst
        (1, 2, 3)
        >>> Star().peers(rank=2, size=4, step=0).dst
        (0,)
    """

    weights: Literal["metropolis", "push-sum"] = "metropolis"

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return rank 0, and for rank 0 all others."""
        edges = _spokes(size)
        return weighted(rank, edges, edges, self.weights)


@lru_cache(maxsize=256)
def _spokes(size: int) -> tuple[tuple[int, ...], ...]:
    return (tuple(range(1, size)), *(((0,),) * (size - 1)))


@registered
class Complete(Topology):
    """Exchange with all others: the exact average in one step, with n-1 vectors sent per worker.

    Example:
        >>> Complete().matrix(size=4, step=0)[0].tolist()
        [0.25, 0.25, 0.25, 0.25]
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return all other ranks."""
        others = tuple(j for j in range(size) if j != rank)
        return uniform(others, others)


@registered
class Hypercube(Topology):
    """Exchange across one dimension of a cube per step: the exact average every log2(n) steps.

    Symmetric, so that it works with methods that need symmetric weights. It needs a power of two workers.

    Example:
        >>> [Hypercube().peers(rank=0, size=8, step=step).dst for step in range(3)]
        [(1,), (2,), (4,)]
    """

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the rank that differs in one bit."""
        if size == 1:
            return uniform((), ())
        partner = rank ^ (1 << (step % self.period(size)))
        return uniform((partner,), (partner,))

    def period(self, size: int) -> int:
        """Return the number of dimensions."""
        return max(1, (size - 1).bit_length())

    def check(self, size: int) -> None:
        """Check that the number of workers is a power of two."""
        if size & (size - 1):
            below = 1 << (size.bit_length() - 1)
            raise ConfigError(
                f"Hypercube() with {size} workers: needs a power of two. Use {below} or {2 * below} "
                "workers, or OnePeerExponential(), which exists for any number"
            )


@registered
class Hierarchical(Topology):
    r"""Use one graph within nodes at most steps, and another between nodes at the others.

    Ranks are numbered node by node. At every `every`-th step, workers with the same position in their nodes exchange
    along the graph `between`; at the others workers exchange within their node along `inside`. The two kinds of step
    commute: a whole period is the product of both graphs' periods, exact if both are. A node's link carries `node_size`
    vectors for each peer in `between`, every `every` steps.

    If there are fewer workers than `node_size`, all of them are one node.

    Args:
        node_size: workers per node, which share a fast link; must divide the number of workers.
        inside: the graph within a node.
        between: the graph between nodes.
        every: steps from one exchange between nodes to the next, at least 2; a larger value sends less over the slow
            links.

    Example:
        Two nodes of four: at even steps within the node, at odd ones with the same position in the other node.

        >>> graph = Hierarchical(node_size=4)
        >>> [graph.peers(rank=1, size=8, step=step).dst for step in range(2)]
        [(0, 2, 3), (5,)]
    """

    node_size: Annotated[int, Range("1..", "Use the number of ranks of a machine")] = 4
    inside: Topology = Complete()
    between: Topology = OnePeerExponential()
    every: Annotated[int, Range("2..", "With 1 no step would be within a node: use {between} for that")] = 2

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return ranks of the same node, or ranks with the same position in other nodes."""
        node_size = min(self.node_size, size)
        node, place = divmod(rank, node_size)
        # The two kinds of step are counted separately, so that each graph runs through its own period.
        turn, within = divmod(step, self.every)
        if within == self.every - 1:
            near = self.between.peers(node, size // node_size, turn)
            return _renumbered(near, node_size, place)
        return _renumbered(self.inside.peers(place, node_size, turn * (self.every - 1) + within), 1, node * node_size)

    def period(self, size: int) -> int:
        """Return the steps until both graphs repeat together."""
        node_size = min(self.node_size, size)
        steps_inside = self.inside.period(node_size)
        # `inside` advances every - 1 steps in a turn of `every`.
        turns = steps_inside // gcd(steps_inside, self.every - 1)
        return self.every * lcm(turns, self.between.period(size // node_size))

    def check(self, size: int) -> None:
        """Check that workers fill whole nodes, and that both graphs accept the numbers."""
        node_size = min(self.node_size, size)
        if size % node_size:
            below = size - size % node_size
            fits = max(each for each in range(1, node_size) if size % each == 0)
            raise ConfigError(
                f"{self} with {size} workers: they must fill whole nodes. Use {below} or {below + node_size} workers, "
                f"or node_size={fits}"
            )
        self.inside.check(node_size)
        self.between.check(size // node_size)


def _renumbered(peers: Peers, factor: int, shift: int) -> Peers:
    """Replace each rank of the edges with factor * rank + shift."""
    dst, src = (tuple(factor * rank + shift for rank in ranks) for ranks in (peers.dst, peers.src))
    return Peers(dst, src, peers.own, peers.weights)
