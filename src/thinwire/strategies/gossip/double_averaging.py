"""Mix parameters and momentum with neighbours."""

from dataclasses import dataclass

from thinwire.reduce.compressed_all_reduce import gossip_
from thinwire.replica.displacement import accumulate_, descend_
from thinwire.replica.replica import Replica
from thinwire.strategies.gossip.base import DecentralisedMomentum
from thinwire.topology.base import Topology
from thinwire.topology.graphs import Ring


@dataclass(frozen=True)
class DoubleAveraging(DecentralisedMomentum):
    r"""Heavy-ball momentum that is mixed with the neighbours' as the parameters are (DA-DmSGD).

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$u_i = \beta m_i + g_i, \qquad x_i \leftarrow \sum_j W_{ij} (x_j - \gamma u_j), \qquad
      m_i \leftarrow \sum_j W_{ij} u_j .$$

    Workers agree on the momentum as well as on the parameters, for twice the bytes. The bias on heterogeneous data lies
    between D-PSGD's and that of momentum which stays local. `momentum=0` is `Gossip(order="after")`; the complete graph
    is AllReduce with momentum. In a step whose learning rate is zero both are mixed, and $m$ decays.
    Traffic: two vectors per neighbour and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Yu, Jin and Yang, On the Linear Speedup Analysis of Communication Efficient Momentum SGD for Distributed Non-Convex
    Optimization, ICML 2019, arXiv:1905.03817.

    Args:
        topology: any graph whose weights are doubly stochastic, changing ones too.
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
    momentum: float = 0.9

    paper = "Yu, Jin and Yang, On the Linear Speedup Analysis of ... Momentum SGD, ICML 2019, arXiv:1905.03817"
    waits = "at every step each worker waits for its neighbours of that step, for both parameters and momentum"
    limits = "sends twice the bytes of the other gossip methods"

    def after_step(self, r: Replica) -> None:
        """Add the momentum to the optimizer's step, and mix both."""
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
