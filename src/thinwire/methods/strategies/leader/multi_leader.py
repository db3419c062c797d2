# SPDX-License-Identifier: Apache-2.0
"""Train locally, and pull workers towards the best one of their node, and less often the best of all."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch.optim import Optimizer

from thinwire.core.comm.members import check_nodes
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Traits
from thinwire.methods.strategies.leader.election import (
    LeaderStrategy,
    ScoreFunction,
    ScoreSource,
    best_rank,
    chain_broadcast_,
    chain_from,
    gather_keys,
    key_of,
    two_level_broadcast_,
    warn_without_leader,
)
from thinwire.registry import registered


@registered
class MultiLeaderSGD(LeaderStrategy):
    r"""Leader SGD with a leader for each node, and one for all.

    With $z_k$ the best worker of node $k$ of $m$ consecutive ranks and $z$ the best of all, by recent losses,

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i); \qquad
      \text{every } \tau \text{ steps: } x_i \leftarrow (1-\lambda) x_i + \lambda z_{k(i)}; \qquad
      \text{every } \tau_G \text{ steps then: } x_i \leftarrow (1-\lambda_G) x_i + \lambda_G z .$$

    Both elections use the same losses. Call `worker.record_batch(loss=loss)` before the optimizer's step.
    Traffic: $\frac{m-1}{m}$ of the parameters per worker and pull within nodes; a pull to the best of all sends the
    parameters $G-1$ times between the $G$ nodes in total. State: `losses`, one number for each step of the period.

    Teng et al., Leader Stochastic Gradient Descent for Distributed Training of Deep Learning Models, NeurIPS 2019,
    arXiv:1905.10395, its multi-leader variant.

    Args:
        period: $\tau$, optimizer steps between elections within nodes; more communicates less.
        pull: $\lambda$, in [0, 1]; more keeps workers closer to their node's leader.
        node_size: $m$, ranks per node.
        global_period: $\tau_G$, steps between elections of all; a multiple of `period`.
        global_pull: $\lambda_G$, in [0, 1]; more keeps nodes closer together.
        metric: "window" compares the mean loss of the last `period` steps, "ema" its exponential mean,
            `ScoreFunction` any score, such as the loss of a batch that is the same on all ranks.
        result: the parameters to evaluate and save: the "mean" of all workers, or the current "leader".

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.constant_(model.weight, 4.0 * comm.rank)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     strategy = MultiLeaderSGD(period=1, pull=0.5, node_size=2, global_period=2)
        ...     worker = thinwire.attach(model, optimizer, strategy, comm=comm, init="own")
        ...     loss = model(torch.ones(1)).sum()
        ...     loss.backward()
        ...     worker.record_batch(loss=loss)
        ...     optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(4, train)  # ranks 0 and 2 lead; ranks 1 and 3 go half of the way to them
        [0.0, 2.0, 8.0, 10.0]
    """

    period: Annotated[int, Range("1..", "16 is usual")] = 16
    pull: Annotated[float, Range("[0, 1]", "0.1 is usual")] = 0.1
    node_size: Annotated[int, Range("1..", "Use the number of ranks of a machine")] = 2
    global_period: int = 64
    global_pull: Annotated[float, Range("[0, 1]", "0.1 is usual")] = 0.1
    metric: ScoreSource = "window"
    result: Literal["leader", "mean"] = "mean"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            inelastic="its nodes are neighboring ranks, whose numbers change when one is lost. Use LeaderSGD()",
            period=self.period,
            # All but the last rank of the chain from the leader send its parameters.
            data_dependent_bytes=self.node_size > 1,
            reads_loss=not isinstance(self.metric, ScoreFunction),
        )

    waits = (
        "every `period` steps, the workers of a node wait for its slowest and for its leader's parameters; every "
        "`global_period` steps, all workers wait"
    )
    limits = "workers need similar data: the one with the easiest data would always lead"

    def __post_init__(self) -> None:
        if self.global_period < 1 or self.global_period % self.period:
            raise ConfigError(
                f"global_period={self.global_period}: must be a multiple of period={self.period}, such as "
                f"{4 * self.period}"
            )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the workers fill whole nodes."""
        check_nodes(self.node_size, size)

    def after_step(self, r: Replica) -> None:
        """Record the loss; at the end of a period follow the node's leader, and if due, the leader of all."""
        self.record_loss(r)
        if r.comm.size == 1 or self.pull == self.global_pull == 0 or r.step % self.period:
            return
        first = r.comm.rank - r.comm.rank % self.node_size
        node, all_ranks = range(first, first + self.node_size), range(r.comm.size)
        both = r.step % self.global_period == 0
        gathered = gather_keys(r, self.score(r), all_ranks if both else node)
        keys = {rank: key_of(r, key, node) for rank, key in gathered.items()}
        node_leader = best_rank([keys[rank] for rank in node])
        leader = best_rank(list(keys.values())) if both else None
        if node_leader is None or (both and leader is None):
            warn_without_leader(r)
        # The best of all is the best of its node, so the first pull does not change it.
        self._follow_(r, node_leader, self.pull, node)
        self._follow_(r, leader, self.global_pull, all_ranks)
        if leader is not None:
            r.metrics["leader"] = float(leader)

    def _follow_(self, r: Replica, leader: int | None, pull: float, members: Sequence[int]) -> None:
        """Move the members, including this rank, a part of the way to the leader."""
        if leader is None:
            return
        x = r.x if r.comm.rank == leader else torch.empty_like(r.x)
        if len(members) == r.comm.size:
            two_level_broadcast_(r.comm, x, leader, self.node_size)
        else:
            chain_broadcast_(r.comm, x, chain_from(leader, members))
        if r.comm.rank != leader:
            r.x.lerp_(x, pull)
