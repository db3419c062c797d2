# SPDX-License-Identifier: Apache-2.0
"""Add a pull towards the best worker to every gradient."""

from typing import Annotated

import torch

from thinwire.core.replica.displacement import descend_
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.leader.election import LeaderStrategy
from thinwire.registry import registered


@registered
class LeaderGradientDescent(LeaderStrategy):
    r"""Leader gradient descent: at every step, add to each worker's gradient a pull towards the best of them.

    With $z = x_j$ of the worker $j$ whose loss at this step is lowest,

    $$x_i \leftarrow x_i - \gamma \left( g_i(x_i) + \lambda (x_i - z) \right) .$$

    $z$ is treated as a constant, so the leader takes its own step only. The pull is scaled by the learning rate and
    does not enter the optimizer's momentum. Call `worker.record_batch(loss=loss)` before the optimizer's step. At every
    fixed point the leader's gradient is zero.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and step, and 8 bytes. State: the last loss, and during a
    step a copy of the parameters.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        pull: $\lambda$, at least 0; a worker moves by $\gamma\lambda$ times its distance to the leader.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 4.0 * comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ...     worker = thinwire.attach(model, optimizer, LeaderGradientDescent(pull=1.0), comm=comm, init="own")
        ...     loss = 0.0 * model(torch.ones(1)).sum()  # no gradient: only the pull moves the parameters
        ...     loss.backward()
        ...     worker.record_batch(loss=float(comm.rank))  # rank 0 is best
        ...     optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(3, train)  # half of the way to rank 0
        [0.0, 2.0, 4.0]
    """

    pull: Annotated[float, Range("[0, inf)", "0.1 is usual")] = 0.1

    waits = "every step, all wait for the slowest worker and for the leader's parameters"
    limits = "communicates at every step; LeaderSGD communicates once per period"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(reads_loss=True)

    def before_step(self, r: Replica) -> None:
        """Save the parameters before the step, for the pull."""
        if r.comm.size > 1 and self.pull:
            r.state["anchor"] = r.x.clone()

    def after_step(self, r: Replica) -> None:
        """Elect the leader by the losses at the saved parameters, and pull towards its saved parameters."""
        # After the optimizer's step: its weight decay, like the gradient, belongs to the parameters before the pull.
        self.record_loss(r)
        anchor = r.state.pop("anchor", None)
        if anchor is None:
            return
        leader = self.elect(r)
        if leader is None:
            return
        mine = r.comm.rank == leader
        z = r.comm.broadcast_(anchor if mine else torch.empty_like(anchor), leader).wait()
        if not mine:
            descend_(r.x, anchor.sub_(z), r.lr, self.pull)
