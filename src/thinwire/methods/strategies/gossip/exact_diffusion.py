# SPDX-License-Identifier: Apache-2.0
"""Mix parameters with neighbors, and correct the bias that mixing causes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from thinwire.core.replica.displacement import Momentum, accumulate_, descend_
from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import gossip_, mean_
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.gossip.base import DecentralisedMomentum
from thinwire.methods.topology.base import Peers, Topology
from thinwire.methods.topology.certificate import Disagreement, exact_diffusion
from thinwire.methods.topology.graphs import Ring
from thinwire.registry import registered


@registered
class ExactDiffusion(DecentralisedMomentum):
    r"""Adapt, add the last step's change by mixing, combine (exact diffusion; with momentum, EDM).

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$m_i \leftarrow \beta m_i + (1-\beta) g_i, \qquad p_i = x_i - \gamma m_i, \qquad
      x_i' = \tfrac12 \sum_j (I + W)_{ij} (p_j + c_j), \qquad c_i \leftarrow x_i' - p_i .$$

    The corrections $c$ sum to zero over workers and converge to each worker's own gradient at the common optimum, so
    the method is unbiased on heterogeneous data, at any learning rate and momentum. `momentum=0` is exact diffusion (D2
    mixes with $W$ itself). The momentum is an average ($1-\beta$ before $g$): to match `SGD(momentum=...)`, multiply
    the learning rate by $1/(1-\beta)$. A step with a learning rate of zero mixes the parameters, and $m$ decays.
    Traffic: one vector per neighbor and step. State: `anchor` ($x$ before the step), `momentum` ($m$) and
    `correction` ($c$).

    Hu et al., A Bias-Correction Decentralized Stochastic Gradient Algorithm with Momentum Acceleration,
    arXiv:2501.19082; without momentum Tang et al., D2: Decentralized Training over Decentralized Data, ICML 2018,
    arXiv:1803.07068.

    Args:
        topology: the graph, static and symmetric or small; see `check`.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.

    Example:
        Two workers with different curvatures; their common optimum is 0.75, which is not the mean of their optima:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        ...     thinwire.attach(model, optimizer, thinwire.ExactDiffusion(momentum=0.5), comm=comm)
        ...     for _ in range(60):
        ...         model.weight.grad = (1 + 2 * comm.rank) * (model.weight.detach() - comm.rank)
        ...         optimizer.step()
        ...     return round(model.weight.item(), 3)
        >>> thinwire.run_threads(2, train)
        [0.75, 0.75]
    """

    topology: Topology = Ring()
    momentum: Momentum = 0.9

    paper = "Hu et al., A Bias-Correction Decentralized ... Algorithm with Momentum Acceleration, arXiv:2501.19082"
    waits = "at every step each worker waits for its neighbors of that step"
    limits = "directed and changing graphs of many workers are unstable; workers agree half as fast as the graph allows"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return replace(super().make_traits(), lr_factor=1.0)  # the momentum is an average

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """The evolution of differences, the same for any momentum."""
        return lambda _: exact_diffusion()

    def start(self, r: Replica) -> None:
        """Allocate the state, with a correction of zero."""
        DecentralisedMomentum.start(self, r)
        r.zeros_state("correction")

    # `restart` does nothing, so it keeps the corrections. They still sum to zero, so they do not move the mean. They
    # compensate the different gradients at the common optimum, and without them the bias would return.

    def after_step(self, r: Replica) -> None:
        """Average the optimizer's steps in the momentum, add the correction, and mix."""
        anchor, momentum, correction = (r.state[name] for name in ("anchor", "momentum", "correction"))
        displacement = anchor.sub_(r.x)
        # The optimizer took the whole step; the average takes 1 - beta of it, and beta of the old momentum.
        r.x.add_(displacement, alpha=self.momentum)
        descend_(r.x, momentum, r.lr, self.momentum)
        accumulate_(momentum, displacement, r.lr, keep=self.momentum, add=1 - self.momentum)
        # The anchor is not needed any more, so its memory holds the adapted parameters.
        adapted = anchor.copy_(r.x)
        gossip_(r.comm, r.x.add_(correction), self.peers(r), r.record_distance).wait()
        torch.sub(r.x, adapted, out=correction)

    def regroup(self, r: Replica, before: int) -> None:
        """Make the corrections of the current workers sum to zero; otherwise their mean would drift."""
        # The sum lacks those of lost workers. A joining worker has the correction of another one, with other data.
        correction = r.state["correction"]
        if not before:
            correction.zero_()
        correction.sub_(mean_(r.comm, correction.clone()).wait())

    def peers(self, r: Replica) -> Peers:
        r"""Return the step's neighbors, with the weights $\tfrac12 (I + W)$."""
        peers = DecentralisedMomentum.peers(self, r)
        halves = tuple(weight / 2 for weight in peers.weights)
        return peers._replace(own=(1 + peers.own) / 2, weights=halves)
