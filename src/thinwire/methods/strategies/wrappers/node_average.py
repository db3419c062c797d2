# SPDX-License-Identifier: Apache-2.0
"""Average within each node between the averages over all workers."""

from dataclasses import replace
from typing import Annotated

import torch
from torch.optim import Optimizer

from thinwire.core.comm.members import check_nodes
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, Traits, weight_of
from thinwire.methods.strategies.local.local_sgd import LocalSGD, Period
from thinwire.methods.strategies.local.means import ring_all_reduce_, weighted_mean_
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.registry import registered


@registered
class NodeAverage(Wrapper):
    r"""Average parameters within each node every `period` steps, between the base's averages over all workers.

    With nodes of $m$ consecutive ranks, at every $\tau$-th step without an average of the base,

    $$x_i \leftarrow \tfrac1m \sum_{j \in \text{node of } i} x_j ,$$

    with the weights of the base's averages. `NodeAverage(LocalSGD(period=32), period=8)` is hierarchical Local SGD. For
    the base a node average is a part of its round, like a local step.
    Traffic: the base's, and at each of these steps $2\frac{m-1}{m}$ of the parameters per worker, within nodes. No
    state.

    Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217.

    Args:
        base: `LocalSGD`; or `SlowMo` or `DiLoCo` around it or around `Local()`.
        period: $\tau$, steps between averages within nodes; divides the base's period.
        node_size: $m$, ranks per node; larger nodes drift less, and each average takes longer.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     strategy = thinwire.NodeAverage(thinwire.LocalSGD(period=2), period=1, node_size=2)
        ...     thinwire.attach(model, optimizer, strategy, comm=comm)
        ...     weights = []
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...         weights.append(model.weight.item())
        ...     return weights
        >>> thinwire.run_threads(4, train)
        [[-0.5, -3.0], [-0.5, -3.0], [-2.5, -3.0], [-2.5, -3.0]]
    """

    base: Strategy = LocalSGD(period=32)
    period: Period = 8
    node_size: Annotated[int, Range("1..", "Use the number of ranks of a machine")] = 2

    paper = "Lin et al., Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, arXiv:1808.07217"
    waits = "as its base; every `period` steps the workers of a node also wait for its slowest one"
    limits = "useful if links within a node are faster than those between nodes"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            period=self.period,
            inelastic="its nodes are neighboring ranks, whose numbers change when one is lost. Use its base",
            rounds=replace(found.rounds, local=False),  # the nodes communicate during a round
        )

    def __post_init__(self) -> None:
        longer = self.base.traits.period
        if longer is None or not self.base.traits.averages_at(longer) or not self.base.traits.rounds.local:
            raise ConfigError(
                f"base={self.base}: must take local steps between averages over all workers. Use LocalSGD(), or "
                "SlowMo() or DiLoCo() around LocalSGD() or Local()"
            )
        if longer % self.period:
            raise ConfigError(f"period={self.period}: must divide the base's period={longer}. Use a divisor of it")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check, and check that the workers fill whole nodes."""
        check_nodes(self.node_size, size)
        super().check(size, optimizer)

    def after_step(self, r: Replica) -> None:
        """Run the base's hook; then average within the node if due, unless the base has averaged over all workers."""
        super().after_step(r)
        if r.step % self.period or self.base.traits.averages_at(r.step):
            return
        first = r.comm.rank - r.comm.rank % self.node_size
        node = range(first, first + self.node_size)
        # The base is not restarted: all workers share its anchor, which must not become that of a node.
        weight = weight_of(self.base, self.inner(r))
        if weight is None and r.x.dtype == torch.float16:
            # In fp16 a sum may overflow although the mean is finite.
            ring_all_reduce_(r.comm, r.x.div_(self.node_size), node)
        elif weight is None:
            ring_all_reduce_(r.comm, r.x, node).div_(self.node_size)
        else:
            weighted_mean_(r.x, weight, lambda vector: ring_all_reduce_(r.comm, vector, node))
