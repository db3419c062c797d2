# SPDX-License-Identifier: Apache-2.0
"""Train locally, and pull every worker towards the best one once per period."""

from typing import Annotated, Literal

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.leader.election import LeaderStrategy, ScoreFunction, ScoreSource
from thinwire.registry import registered


@registered
class LeaderSGD(LeaderStrategy):
    r"""Leader SGD: train locally, and every `period` steps move all workers a part of the way to the best one.

    With $z = x_j$ of the worker $j$ whose recent losses are lowest,

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i); \qquad
      \text{every } \tau \text{ steps: } x_i \leftarrow (1-\lambda) x_i + \lambda z .$$

    Call `worker.record_batch(loss=loss)` before the optimizer's step. With `pull=0` workers train alone. With `pull=1`
    and `period=1` all workers copy the best one after each step. The optimizer's state stays local. `MultiLeaderSGD`
    also has a leader in each node.
    Traffic: $\frac{n-1}{n}$ of the parameters per worker and period (half of an average's), and 8 bytes. State:
    `losses`, one number for each step of the period.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395.

    Args:
        period: $\tau$, optimizer steps between elections; more communicates less.
        pull: $\lambda$, in [0, 1]; more keeps workers closer to the leader, and lets them explore less.
        metric: "window" compares the mean loss of the last `period` steps, "ema" its exponential mean,
            `ScoreFunction` any score, such as the loss of a batch that is the same on all ranks.
        result: the parameters to evaluate and save: the "mean" of all workers, or the current "leader".

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 4.0 * comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     worker = thinwire.attach(model, optimizer, LeaderSGD(period=2, pull=0.25), comm=comm, init="own")
        ...     for _ in range(2):
        ...         loss = model(torch.ones(1)).sum()
        ...         loss.backward()
        ...         worker.record_batch(loss=loss)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(3, train)  # rank 0 has the lowest loss; the others move 25 % of the way to it
        [0.0, 3.0, 6.0]
    """

    period: Annotated[int, Range("1..", "16 is usual")] = 16
    pull: Annotated[float, Range("[0, 1]", "0.1 is usual")] = 0.1
    metric: ScoreSource = "window"
    result: Literal["leader", "mean"] = "mean"

    waits = "every `period` steps, all wait for the slowest and for the leader's parameters"
    limits = "workers need similar data: the one with the easiest data would always lead"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(period=self.period, reads_loss=not isinstance(self.metric, ScoreFunction))

    def after_step(self, r: Replica) -> None:
        """Record the loss; at the end of the period, elect a leader and move towards it."""
        self.record_loss(r)
        if r.comm.size > 1 and self.pull and r.step % self.period == 0:
            self.follow_(r)
