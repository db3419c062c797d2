# SPDX-License-Identifier: Apache-2.0
"""Mix parameters and momentum with neighbors."""

from thinwire.core.replica.displacement import Momentum, accumulate_, descend_
from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import gossip_
from thinwire.methods.strategies.gossip.base import DecentralisedMomentum
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.graphs import Ring
from thinwire.registry import registered


@registered
class DoubleAveraging(DecentralisedMomentum):
    r"""Gossip with heavy-ball momentum: each worker averages its parameters and its momentum with its neighbors.

    This is DA-DmSGD. With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer
    subtracts,

    $$u_i = \beta m_i + g_i, \qquad x_i \leftarrow \sum_j W_{ij} (x_j - \gamma u_j), \qquad
      m_i \leftarrow \sum_j W_{ij} u_j .$$

    Workers agree on the momentum as well as on the parameters, for twice the bytes. The bias on heterogeneous data lies
    between that of D-PSGD, which has no momentum, and that of D-PSGD with local momentum. `momentum=0` equals
    `Gossip(order="after")`; on the complete graph the method equals AllReduce with momentum. A step whose learning rate
    is zero also mixes both, and $m$ decays.
    Traffic: two vectors per neighbor and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Yu, Jin and Yang, On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization, ICML 2019, arXiv:1905.03817.

    Args:
        topology: any graph with doubly stochastic weights; it may change from step to step.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.

    Example:
        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, thinwire.DoubleAveraging(momentum=0.5), comm=comm)
        ...     for _ in range(40):
        ...         optimizer.zero_grad()
        ...         (0.5 * (model.weight - comm.rank).square()).sum().backward()
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return round(model.weight.item(), 3)
        >>> thinwire.run_threads(4, train)
        [1.5, 1.5, 1.5, 1.5]
    """

    topology: Topology = Ring()
    momentum: Momentum = 0.9

    paper = "Yu, Jin and Yang, On the Linear Speedup Analysis of ... Momentum SGD, ICML 2019, arXiv:1905.03817"
    waits = "at every step each worker waits for its neighbors of that step, for both parameters and momentum"
    limits = "sends twice the bytes of the other gossip methods"

    def after_step(self, r: Replica) -> None:
        """Add the momentum to the optimizer's step, and average parameters and momentum with the neighbors."""
        displacement, momentum = r.state["anchor"], r.state["momentum"]
        peers = self.peers(r)
        displacement.sub_(r.x)
        descend_(r.x, momentum, r.lr, self.momentum)
        # The parameters are sent while the momentum is computed.
        parameters = gossip_(r.comm, r.x, peers, r.record_distance)
        # The momentum is updated before it is sent, so that both vectors are of this step.
        accumulate_(momentum, displacement, r.lr, keep=self.momentum)
        direction = gossip_(r.comm, momentum, peers)
        parameters.wait()
        direction.wait()
