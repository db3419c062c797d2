# SPDX-License-Identifier: Apache-2.0
"""Any graph, used only every few steps."""

from __future__ import annotations

from typing import Annotated

from thinwire.core.validation import Range
from thinwire.methods.topology.base import Peers, Topology
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered


@registered
class Periodic(Topology):
    r"""Use a graph at every $\tau$-th step; at the others every worker keeps its own vector.

    This gives methods on a graph a period: workers take local steps, and send at the end of every $\tau$-th. The inner
    graph advances by one step each time. `Gossip(Periodic(Ring(), every=8))` is decentralized local SGD.
    `PushSum(Periodic(OnePeerExponential(), every=4), staleness=4)` is Overlap SGP as in its Algorithm 2, which sends
    every $\tau$ steps and has $\tau$ steps to receive. Traffic is divided by $\tau$, and workers drift further apart.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792, Algorithm 2;
    Koloskova et al., A Unified Theory of Decentralized SGD with Changing Topology and Local Updates, ICML 2020,
    arXiv:2003.10422.

    Args:
        topology: the graph.
        every: $\tau$, steps from one exchange to the next; a larger value sends less.

    Example:
        >>> from thinwire import Periodic, Ring
        >>> [Periodic(Ring(), every=3).peers(rank=0, size=4, step=step).dst for step in range(4)]
        [(), (), (1, 3), ()]
    """

    topology: Topology = OnePeerExponential()
    every: Annotated[int, Range("1..", "1 is the graph itself")] = 4

    def check(self, size: int) -> None:
        """Run the check of the graph."""
        self.topology.check(size)

    def peers(self, rank: int, size: int, step: int) -> Peers:
        """Return the graph's peers at the last step of a period, else none."""
        turn, within = divmod(step, self.every)
        return self.topology.peers(rank, size, turn) if within == self.every - 1 else Peers((), (), 1.0, ())

    def period(self, size: int) -> int:
        """Return the graph's period in steps."""
        return self.every * self.topology.period(size)
