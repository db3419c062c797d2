# SPDX-License-Identifier: Apache-2.0
"""Outer steps with a momentum, for which each worker meets one other instead of all."""

from collections.abc import Callable
from functools import cached_property
from math import inf

import torch
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy
from thinwire.methods.strategies.traits import Traits
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import Disagreement, check_average_kept, check_stable
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.matching import RandomMatching
from thinwire.registry import registered


@registered
class NoLoCo(Strategy):
    r"""DiLoCo without an all-reduce: every `period` steps each worker takes an outer step with a random partner.

    With $\phi_i$ the point where worker $i$ began its round, $x_i$ its parameters after $H$ steps, and $W$ the weights
    of the round's graph (a half each for the worker and its partner),

    $$\delta_i \leftarrow \beta \delta_i + \eta \sum_j W_{ij} (x_j - \phi_j)
        + \gamma \Bigl( \sum_j W_{ij} \phi_j - \phi_i \Bigr), \qquad
      \phi_i \leftarrow \phi_i + \delta_i, \qquad x_i \leftarrow \phi_i .$$

    The first sum is the outer gradient of DiLoCo, among few; the second pulls the points together, which nothing else
    does. With $\gamma = \eta$, as in the authors' code, the two are $\eta (\sum_j W_{ij} x_j - \phi_i)$, and only $x_i$
    has to be sent. Without gradients differences between workers shrink on their own, which is computed for the graph
    before step 0; $\gamma$ below $2 + 2\beta$ is needed for any pair. The mean of all workers moves as in DiLoCo with
    heavy-ball momentum. A worker without a partner steps alone.
    Traffic: one vector per neighbor and period, two with another $\gamma$ than $\eta$. State: `anchor` ($\phi$) and
    `velocity` ($\delta$), like the parameters in fp32 at least.

    Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method for Large Models, 2025,
    arXiv:2506.10911; the update and the defaults of `lr`, `momentum` and `pull` are those of the authors' code for its
    experiments.

    Args:
        topology: whom a worker meets, a step of the graph for each outer step; its weights must be doubly stochastic.
        period: $H$, optimizer steps between outer steps; more sends less.
        lr: $\eta$, of the outer step; more trusts the workers' way further.
        momentum: $\beta$ in [0, 1), of the outer step; more smooths it, and raises the effective learning rate.
        pull: $\gamma$, of the points towards each other; None is $\eta$. More keeps workers closer together.

    Example:
        Two workers that drift apart by one each step; the first outer step takes 0.7 of their mean way:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.NoLoCo(period=2), comm=comm)
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return round(model.weight.item(), 3)
        >>> thinwire.run_threads(2, train)
        [-0.7, -0.7]
    """

    topology: Topology = RandomMatching()
    period: int = 50
    lr: float = 0.7
    momentum: float = 0.5
    pull: float | None = None

    paper = "Kolehmainen et al., NoLoCo, 2025, arXiv:2506.10911"
    waits = "every `period` steps each worker waits for its partner of that round"
    limits = "workers hold different parameters; evaluate at consensus"

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period,
            topology=self.topology,
            elementwise=True,
            lr_factor=self.lr / (1 - self.momentum),
            # The velocity and the points belong to single workers.
            on_resize="start",
        )

    def __post_init__(self) -> None:
        """Check the types and the ranges."""
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 50 is usual")
        if not 0 < self.lr < inf:
            raise ConfigError(f"lr={self.lr}: the outer step must be positive and finite; 0.7 is usual")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must lie in [0, 1); 0.5 is usual")
        if self.pull is not None and not 0 < self.pull < inf:
            raise ConfigError(
                f"pull={self.pull}: must be positive, as nothing else keeps workers together; None takes lr={self.lr}"
            )

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """How differences between workers evolve over one outer step, given a momentum."""
        pull = self.lr if self.pull is None else self.pull
        return lambda b: Disagreement(((pull, 0), (pull, 0)), ((1 - pull, b), (-pull, b)))

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse graphs that do not keep the average, and those on which workers would drift apart."""
        check_average_kept(self, self.topology, size)
        check_stable(self, self.topology, size, self.differences, self.momentum)

    def start(self, r: Replica) -> None:
        """The first round begins at the initial parameters."""
        exact = torch.promote_types(r.x.dtype, torch.float32)
        r.state["anchor"] = r.x.to(exact, copy=True)
        r.state["velocity"] = torch.zeros_like(r.state["anchor"])

    def after_step(self, r: Replica) -> None:
        """At the end of a period, exchange parameters with the partner, and take the outer step."""
        if r.step % self.period:
            return
        anchor, velocity = r.state["anchor"], r.state["velocity"]
        peers = exact_weights(self.topology, r.comm.rank, r.comm.size, r.step // self.period - 1, anchor.dtype)
        both = self.pull is not None and self.pull != self.lr
        # Anchors are sent in the parameters' dtype, as the rounds began there.
        message = torch.cat([r.x, anchor.to(r.x.dtype)]) if both else r.x
        received = r.comm.send_recv(message, peers.dst, peers.src).wait()
        n = r.x.numel()
        r.record_distance(r.x, [theirs[:n] for theirs in received])

        def gap(mine: slice) -> torch.Tensor:
            """The weighted mean of a part of the messages, from the anchor."""
            total = (message[mine].to(anchor.dtype) - anchor).mul_(peers.own)
            for weight, theirs in zip(peers.weights, received, strict=True):
                total.add_(theirs[mine].to(anchor.dtype) - anchor, alpha=weight)
            return total

        velocity.mul_(self.momentum).add_(gap(slice(0, n)), alpha=self.lr)
        if both:
            assert self.pull is not None
            velocity.add_(gap(slice(n, 2 * n)), alpha=self.pull - self.lr)
        anchor.add_(velocity)
        r.x.copy_(anchor)

    def restart(self, r: Replica) -> None:
        """Begin a round at the parameters; the velocity is a way, and refers to no point."""
        r.state["anchor"].copy_(r.x)
