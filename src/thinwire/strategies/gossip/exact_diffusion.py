"""Mix parameters with neighbours, and undo the bias that mixing brings."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from thinwire.reduce.compressed_all_reduce import gossip_
from thinwire.replica.displacement import accumulate_, descend_
from thinwire.replica.replica import Replica
from thinwire.strategies.gossip.base import DecentralisedMomentum
from thinwire.topology.base import Peers, Topology
from thinwire.topology.certificate import Disagreement, exact_diffusion
from thinwire.topology.graphs import Ring


@dataclass(frozen=True)
class ExactDiffusion(DecentralisedMomentum):
    r"""Adapt, correct by what mixing changed last time, combine (exact diffusion; with momentum, EDM).

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$m_i \leftarrow \beta m_i + (1-\beta) g_i, \qquad p_i = x_i - \gamma m_i, \qquad
      x_i' = \tfrac12 \sum_j (I + W)_{ij} (p_j + c_j), \qquad c_i \leftarrow x_i' - p_i .$$

    The corrections $c$ sum to zero over workers and learn each worker's own gradient at the common optimum: on
    heterogeneous data nothing is left of the bias, at any learning rate and momentum. `momentum=0` is exact diffusion
    (D2 mixes with $W$ itself). The momentum is an average ($1-\beta$ before $g$): for the pace of `SGD(momentum=...)`
    multiply the learning rate by $1/(1-\beta)$. A step whose learning rate is zero mixes, and lets $m$ decay.
    Traffic: one vector per neighbour and step. State: `anchor` ($x$ before the step), `momentum` ($m$) and
    `correction` ($c$).

    Hu et al., A Bias-Correction Decentralized Stochastic Gradient Algorithm with Momentum Acceleration,
    arXiv:2501.19082; without momentum Tang et al., D2: Decentralized Training over Decentralized Data, ICML 2018,
    arXiv:1803.07068.

    Args:
        topology: the graph, static and symmetric or small; see `check`.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.
    """

    topology: Topology = Ring()
    momentum: float = 0.9

    paper = "Hu et al., A Bias-Correction Decentralized ... Algorithm with Momentum Acceleration, arXiv:2501.19082"
    waits = "every step, each worker waits for its neighbours of that step"
    limits = "directed and changing graphs of many workers are unstable; agrees half as fast as the graph could"

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """The same at any momentum."""
        return lambda _: exact_diffusion()

    def start(self, r: Replica) -> None:
        """Begin without momentum and with nothing to correct."""
        DecentralisedMomentum.start(self, r)
        r.zeros_state("correction")

    def after_step(self, r: Replica) -> None:
        """Let the momentum smooth the optimizer's step, correct it, and mix."""
        anchor, momentum, correction = (r.state[name] for name in ("anchor", "momentum", "correction"))
        displacement = anchor.sub_(r.x)
        r.x.add_(displacement, alpha=self.momentum)
        descend_(r.x, momentum, r.lr, self.momentum)
        accumulate_(momentum, displacement, r.lr, keep=self.momentum, add=1 - self.momentum)
        adapted = anchor.copy_(r.x)
        gossip_(r.comm, r.x.add_(correction), self.peers(r), r.notice_distance).wait()
        torch.sub(r.x, adapted, out=correction)

    def peers(self, r: Replica) -> Peers:
        r"""The step's neighbours, with the weights $\tfrac12 (I + W)$."""
        peers = DecentralisedMomentum.peers(self, r)
        halves = tuple(weight / 2 for weight in peers.weights)
        return peers._replace(own=(1 + peers.own) / 2, weights=halves)
