# SPDX-License-Identifier: Apache-2.0
"""Outer steps with momentum, for which each worker communicates with one partner instead of all workers."""

from collections.abc import Callable
from typing import Annotated

import torch
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.topology.base import Topology
from thinwire.methods.topology.certificate import Disagreement, check_average_kept, check_stable
from thinwire.methods.topology.exact_weights import exact_weights
from thinwire.methods.topology.matching import RandomMatching
from thinwire.registry import registered


@registered
class NoLoCo(Strategy):
    r"""DiLoCo without an all-reduce: every `period` steps each worker takes an outer step with a random partner.

    With $\phi_i$ the parameters of worker $i$ at the start of a round, $x_i$ those after $H$ steps, and $W$ the weights
    of the round's graph (1/2 each for the worker and its partner),

    $$\delta_i \leftarrow \beta \delta_i + \eta \sum_j W_{ij} (x_j - \phi_j)
        + \gamma \Bigl( \sum_j W_{ij} \phi_j - \phi_i \Bigr), \qquad
      \phi_i \leftarrow \phi_i + \delta_i, \qquad x_i \leftarrow \phi_i .$$

    The first sum is the outer gradient of DiLoCo, over the partners; the second pulls the points $\phi$ together. With
    $\gamma = \eta$, as in the authors' code, the sum of both is $\eta (\sum_j W_{ij} x_j - \phi_i)$, and only $x_i$ is
    sent. It is checked before step 0 that differences between workers shrink on this graph while gradients are zero;
    any pair needs $\gamma < 2 + 2\beta$. The mean of all workers moves as in DiLoCo with heavy-ball momentum. A worker
    without a partner steps alone.
    Traffic: one vector per neighbor and period, two if $\gamma \ne \eta$. State: `anchor` ($\phi$) and
    `velocity` ($\delta$), like the parameters in fp32 at least.

    Kolehmainen et al., NoLoCo: No-all-reduce Low Communication Training Method for Large Models, 2025,
    arXiv:2506.10911; the update and the defaults of `lr`, `momentum` and `pull` are those of the authors' code for its
    experiments.

    Args:
        topology: the graph, with one of its steps for each outer step; its weights must be doubly stochastic.
        period: $H$, optimizer steps between outer steps; more sends less.
        lr: $\eta$, the outer learning rate; more follows the workers' displacements further.
        momentum: $\beta$ in [0, 1), of the outer step; more smooths it, and increases the effective learning rate.
        pull: $\gamma$, the pull of the points towards each other; None is $\eta$. More keeps workers closer together.

    Example:
        Two workers whose difference grows by one each step; the first outer step is 0.7 of their mean displacement:

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
    period: Annotated[int, Range("1..", "50 is usual")] = 50
    lr: Annotated[float, Range("(0, inf)", "0.7 is usual")] = 0.7
    momentum: Annotated[float, Range("[0, 1)", "0.5 is usual")] = 0.5
    pull: Annotated[float | None, Range("(0, inf)", "Nothing else keeps workers together. None takes lr={lr}")] = None

    paper = "Kolehmainen et al., NoLoCo, 2025, arXiv:2506.10911"
    waits = "every `period` steps each worker waits for its partner of that round"
    limits = "workers hold different parameters; evaluate at consensus"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period,
            topology=self.topology,
            lr_factor=self.lr / (1 - self.momentum),
            # Velocities and anchors belong to single workers.
            on_resize="start",
        )

    @property
    def differences(self) -> Callable[[float], Disagreement]:
        """The evolution of differences between workers in one outer step, given a momentum."""
        pull = self.lr if self.pull is None else self.pull
        return lambda b: Disagreement(((pull, 0), (pull, 0)), ((1 - pull, b), (-pull, b)))

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the graph keeps the average, and that workers do not diverge on it."""
        check_average_kept(self, self.topology, size)
        check_stable(self, self.topology, size, self.differences, self.momentum)

    def start(self, r: Replica) -> None:
        """Start the first round at the initial parameters."""
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
        # Anchors are sent in the parameters' dtype, in which the round started.
        message = torch.cat([r.x, anchor.to(r.x.dtype)]) if both else r.x
        received = r.comm.send_recv(message, peers.dst, peers.src).wait()
        n = r.x.numel()
        r.record_distance(r.x, [theirs[:n] for theirs in received])

        def gap(mine: slice) -> torch.Tensor:
            """Return the weighted mean of a part of the messages, minus the anchor."""
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
        """Start a round at the parameters; the velocity does not refer to them, and is kept."""
        r.state["anchor"].copy_(r.x)
