# SPDX-License-Identifier: Apache-2.0
"""Mix parameters with neighbors, with a momentum of the mixed parameters' displacement."""

from collections.abc import Callable
from typing import Annotated

from thinwire.core.replica.displacement import Momentum, accumulate_, descend_
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.reduce.compressed_all_reduce import gossip_
from thinwire.methods.strategies.gossip.base import DecentralisedMomentum
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import Disagreement, quasi_global
from thinwire.methods.topology.exponential import OnePeerExponential
from thinwire.registry import registered


@registered
class QuasiGlobal(DecentralisedMomentum):
    r"""Step along a momentum that follows the displacement of the mixed parameters (QG-DmSGD).

    With $W$ the doubly stochastic weights of the graph and $\gamma g$ what the worker's optimizer subtracts,

    $$u_i = g_i + \beta m_i, \qquad x_i' = \sum_j W_{ij} (x_j - \gamma u_j), \qquad
      m_i \leftarrow \mu m_i + \tfrac{1-\mu}{\gamma} (x_i - x_i') .$$

    After mixing, the displacement is nearly the same on all workers, so $m$ estimates the global direction without a
    message of its own. The bias on heterogeneous data is D-PSGD's, at any momentum; the fixed point of Nesterov's form
    is D-PSGD's at the learning rate $(1+\beta)\gamma$. `momentum=0` is `Gossip(order="after")`.
    It is stable on directed and changing graphs, unlike DecentLaM. A step with a learning rate of zero mixes the
    parameters, and $m$ decays.
    Traffic: one vector per neighbor and step. State: `anchor` ($x$ before the step) and `momentum` ($m$).

    Lin et al., Quasi-Global Momentum: Accelerating Decentralized Deep Learning on Heterogeneous Data, ICML 2021,
    arXiv:2102.04761.

    Args:
        topology: any graph with doubly stochastic weights; it may change from step to step.
        momentum: $\beta$, in [0, 1); the optimizer must have none of its own.
        nesterov: use Nesterov momentum, $u_i = g_i + \beta (g_i + \beta m_i)$.
        memory: $\mu$ in [0, 1), the decay of $m$; more smooths more. None is the momentum.

    Example:
        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, thinwire.QuasiGlobal(momentum=0.5), comm=comm)
        ...     for _ in range(40):
        ...         optimizer.zero_grad()
        ...         (0.5 * (model.weight - comm.rank).square()).sum().backward()
        ...         optimizer.step()
        ...     with worker.consensus():
        ...         return round(model.weight.item(), 3)
        >>> thinwire.run_threads(4, train)
        [1.5, 1.5, 1.5, 1.5]
    """

    topology: Topology = OnePeerExponential()
    momentum: Momentum = 0.9
    nesterov: bool = False
    memory: Annotated[float | None, Range("[0, 1)", "None takes the momentum's value")] = None

    paper = (
        "Lin et al., Quasi-Global Momentum: Accelerating Decentralized Deep Learning ..., ICML 2021, arXiv:2102.04761"
    )
    waits = "at every step each worker waits for its neighbors of that step"
    limits = (
        "needs a smaller learning rate than heavy-ball momentum; workers hold different parameters between averages of "
        "all"
    )

    @property
    def kept(self) -> float:
        r"""$\mu$: `memory`, or by default the momentum."""
        return self.momentum if self.memory is None else self.memory

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """The evolution of differences in the chosen form, given a momentum."""
        return lambda b: quasi_global(b, memory=b if self.memory is None else self.memory, nesterov=self.nesterov)

    def after_step(self, r: Replica) -> None:
        """Add the momentum to the optimizer's step, mix, and update the momentum with the displacement."""
        displacement, momentum = r.state["anchor"], r.state["momentum"]
        if self.nesterov:
            # Extrapolate from the start of the step: (1 + beta) times the optimizer's step.
            r.x.lerp_(displacement, -self.momentum)
        descend_(r.x, momentum, r.lr, self.momentum**2 if self.nesterov else self.momentum)
        gossip_(r.comm, r.x, self.peers(r), r.record_distance).wait()
        accumulate_(momentum, displacement.sub_(r.x), r.lr, keep=self.kept, add=1 - self.kept)
