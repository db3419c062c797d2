# SPDX-License-Identifier: Apache-2.0
"""Mix parameters with neighbors, with momentum on the whole displacement."""

from collections.abc import Callable
from functools import partial

from thinwire.core.replica.displacement import Momentum, accumulate_, descend_
from thinwire.core.replica.replica import Replica
from thinwire.methods.reduce.compressed_all_reduce import gossip_
from thinwire.methods.strategies.gossip.base import DecentralisedMomentum
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import Disagreement, decentlam
from thinwire.methods.topology.graphs import Ring
from thinwire.registry import registered


@registered
class DecentLaM(DecentralisedMomentum):
    r"""Adapt and combine as D-PSGD does, with heavy-ball momentum on the whole displacement.

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$\hat x_i = \sum_j W_{ij} (x_j - \gamma g_j), \qquad
      m_i \leftarrow \beta m_i + \tfrac1\gamma (x_i - \hat x_i), \qquad x_i \leftarrow x_i - \gamma m_i .$$

    The momentum includes the correction by the neighbors, so it vanishes at D-PSGD's fixed point: the bias on
    heterogeneous data is D-PSGD's, without the factor $1/(1-\beta)^2$ that momentum on gradients brings. An equivalent
    form without $m$ is $x_i \leftarrow \hat x_i + \beta \frac{\gamma}{\gamma'}(x_i - x_i')$, with a prime for values of
    the previous step. `momentum=0` is `Gossip(order="after")`; the complete graph is AllReduce with momentum. A step
    with a learning rate of zero mixes the parameters, and $m$ decays.
    Traffic: one vector per neighbor and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch Deep Training, ICCV 2021, arXiv:2104.11981.

    Args:
        topology: the graph, static and symmetric unless the momentum is small; see `check`.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.
        nesterov: use Nesterov momentum, $x_i \leftarrow \hat x_i - \gamma \beta m_i$ with the new $m$; the fixed points
            are the same.

    Example:
        On a static symmetric graph any momentum is stable; on a changing graph the largest stable one is computed:

        >>> import thinwire
        >>> from thinwire.methods.topology.certificate import largest_stable_momentum
        >>> method = thinwire.DecentLaM().differences
        >>> largest_stable_momentum(thinwire.Ring(), 8, method)
        0.99
        >>> largest_stable_momentum(thinwire.OnePeerExponential(), 8, method)
        0.7
    """

    topology: Topology = Ring()
    momentum: Momentum = 0.9
    nesterov: bool = False

    paper = "Yuan et al., DecentLaM: Decentralized Momentum SGD for Large-batch ..., ICCV 2021, arXiv:2104.11981"
    waits = "at every step each worker waits for its neighbors of that step"
    limits = (
        "on directed and changing graphs only a small momentum is stable; workers hold different parameters between "
        "averages of all"
    )

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """The evolution of differences in the chosen form."""
        return partial(decentlam, nesterov=self.nesterov)

    def after_step(self, r: Replica) -> None:
        """Mix, and step along the momentum of all displacements so far."""
        displacement, momentum = r.state["anchor"], r.state["momentum"]
        gossip_(r.comm, r.x, self.peers(r), r.record_distance).wait()
        displacement.sub_(r.x)
        # x contains this displacement already: heavy ball adds the momentum before it, Nesterov's form the one after.
        if not self.nesterov:
            descend_(r.x, momentum, r.lr, self.momentum)
        accumulate_(momentum, displacement, r.lr, keep=self.momentum)
        if self.nesterov:
            descend_(r.x, momentum, r.lr, self.momentum)
