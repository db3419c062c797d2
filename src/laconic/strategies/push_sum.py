"""Push shares of the parameters along a directed graph, and divide the bias away."""

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.kinds import check_kinds
from laconic.reduce import gossip_
from laconic.replica import Replica
from laconic.strategies.base import Strategy
from laconic.topology.base import Topology, check_edges, doubly_stochastic
from laconic.topology.graphs import OnePeerExponential


@dataclass(frozen=True)
class PushSum(Strategy):
    r"""Stochastic Gradient Push: send shares of parameters and of a weight, and train at their quotient.

    With $P$ column-stochastic (each worker decides only how to split what is its own), $w_i = 1$ at first and
    $z_i = x_i / w_i$ the de-biased parameters, which the model holds,

    $$x_i \leftarrow \sum_j P_{ij} \bigl(x_j - \gamma\, d_j(z_j)\bigr), \qquad
      w_i \leftarrow \sum_j P_{ij} w_j, \qquad z_i \leftarrow x_i / w_i ,$$

    where $d$ is the update of the worker's own optimizer, whose momentum stays local and whose weight decay acts on
    $z$. The sums over workers of $x$ and of $w$ change only by the updates. Where the graph is doubly stochastic
    $w$ is one, always, and neither sent nor stored.
    Traffic: one vector per peer and step; where $w$ is sent it is one element more, and in fp32 at least. State: none,
    or `mass`, that vector of $x$ and $w$ together, and `debiased`, $z$ before the step.

    Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792, Algorithm 1.

    Args:
        topology: any graph, directed and time-varying ones too, that connects everyone over its period.
    """

    topology: Topology = OnePeerExponential()

    paper = "Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019, arXiv:1811.10792"
    waits = "every step, each worker waits for the peers that send to it in that step"
    limits = "workers differ by what has not yet spread; evaluate at consensus"

    def __post_init__(self) -> None:
        """Check the kinds."""
        check_kinds(self)

    def check(self, size: int) -> None:
        """Refuse graphs that do not exist, do not connect, or lose mass."""
        check_edges(self.topology, size)

    def start(self, r: Replica) -> None:
        """Give every worker the weight one, unless it can never change."""
        if not self._weightless(r):
            exact = torch.promote_types(r.x.dtype, torch.float32)
            r.state["mass"] = torch.cat([r.x, r.x.new_ones(1)]).to(exact)
            r.state["debiased"] = r.x.clone()

    def after_step(self, r: Replica) -> None:
        """Carry the update over to the mass, push shares of it, and de-bias."""
        peers = self.topology.peers(r.comm.rank, r.comm.size, r.step - 1)
        if self._weightless(r):
            gossip_(r.comm, r.x, peers).wait()
            return
        mass, debiased = r.state["mass"], r.state["debiased"]
        mass[:-1].sub_(debiased.sub_(r.x))
        gossip_(r.comm, mass, peers).wait()
        _divide_(r, mass)

    def average_(self, r: Replica) -> None:
        """Sum mass and weight over workers; everyone gets the quotient, and the weight one."""
        if self._weightless(r):
            super().average_(r)
            return
        mass = r.state["mass"]
        r.comm.sum_(mass).wait()
        mass.div_(mass[-1].clone())
        _divide_(r, mass)

    def consensus(self, r: Replica) -> Tensor:
        """The total mass over the total weight."""
        if self._weightless(r):
            return super().consensus(r)
        total = r.comm.sum_(r.state["mass"].clone()).wait()
        return total[:-1] / total[-1]

    def _weightless(self, r: Replica) -> bool:
        return doubly_stochastic(self.topology, r.comm.size)


def _divide_(r: Replica, mass: Tensor) -> None:
    """The model's parameters become the de-biased ones."""
    r.x.copy_(mass[:-1] / mass[-1])
    r.state["debiased"].copy_(r.x)
