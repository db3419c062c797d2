"""Mix parameters with neighbours, and give momentum to the whole displacement."""

from dataclasses import dataclass

from torch.optim import Optimizer

from laconic.displacement import accumulate_, check_momentum, check_resolution, descend_, refuse_momentum
from laconic.kinds import check_kinds
from laconic.reduce import gossip_
from laconic.replica import Replica
from laconic.strategies.base import Strategy
from laconic.topology.base import Topology
from laconic.topology.certificate import check_average_kept, check_stable, decentlam
from laconic.topology.graphs import Ring
from laconic.topology.shares import whole_shares


@dataclass(frozen=True)
class DecentLaM(Strategy):
    r"""Adapt and combine as D-PSGD does, then run heavy-ball momentum on everything that has moved.

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$\hat x_i = \sum_j W_{ij} (x_j - \gamma g_j), \qquad
      m_i \leftarrow \beta m_i + \tfrac1\gamma (x_i - \hat x_i), \qquad x_i \leftarrow x_i - \gamma m_i .$$

    Momentum sees the correction by the neighbours too and vanishes where D-PSGD comes to rest: the bias on
    heterogeneous data is D-PSGD's, without the factor $1/(1-\beta)^2$ that momentum on gradients puts before it. It is
    $x_i \leftarrow \hat x_i + \beta \frac{\gamma}{\gamma'}(x_i - x_i')$, dashes for the step before. `momentum=0` is
    `Gossip(order="after")`; the complete graph is AllReduce with momentum. A step whose learning rate is zero mixes,
    and lets $m$ decay.
    Traffic: one vector per neighbour and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training, ICCV 2021, arXiv:2104.11981.

    Args:
        topology: the graph, static and symmetric unless the momentum is small; see `check`.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.
        nesterov: look ahead, $x_i \leftarrow \hat x_i - \gamma \beta m_i$ with the new $m$; the same points of rest.
    """

    topology: Topology = Ring()
    momentum: float = 0.9
    nesterov: bool = False

    paper = "Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch ..., ICCV 2021, arXiv:2104.11981"
    waits = "every step, each worker waits for its neighbours of that step"
    limits = "directed and changing graphs bear little momentum; workers differ by what has not yet spread"

    def __post_init__(self) -> None:
        """Check the kinds and the momentum."""
        check_kinds(self)
        check_momentum(self.momentum)

    def check(self, size: int) -> None:
        """Refuse graphs that move the average, and those on which this much momentum diverges."""
        check_average_kept(self, self.topology, size)
        check_stable(self, self.topology, size, lambda b: decentlam(b, nesterov=self.nesterov), self.momentum)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a second momentum."""
        refuse_momentum(optimizer, self)

    def start(self, r: Replica) -> None:
        """Begin without momentum."""
        check_resolution(r.x, self)
        r.scratch("anchor")
        r.scratch("momentum")

    def before_step(self, r: Replica) -> None:
        """Remember where the step begins."""
        r.state["anchor"].copy_(r.x)

    def after_step(self, r: Replica) -> None:
        """Mix, and move on by the momentum of all displacements so far."""
        displacement, momentum = r.state["anchor"], r.state["momentum"]
        peers = whole_shares(self.topology, r.comm.rank, r.comm.size, r.step - 1, r.x.dtype)
        gossip_(r.comm, r.x, peers, r.notice_distance).wait()
        displacement.sub_(r.x)
        if not self.nesterov:
            descend_(r.x, momentum, r.lr, self.momentum)
        accumulate_(momentum, displacement, r.lr, keep=self.momentum)
        if self.nesterov:
            descend_(r.x, momentum, r.lr, self.momentum)
