# SPDX-License-Identifier: Apache-2.0
"""Average every period, and let an outer optimizer take a step along the workers' mean displacement."""

from collections.abc import MutableMapping

from torch import Tensor

from thinwire.codecs.base import Codec
from thinwire.errors import ConfigError
from thinwire.registry import registered
from thinwire.strategies.base import Strategy, trait
from thinwire.strategies.local.local_sgd import Local
from thinwire.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.strategies.local.outer_step import OuterStep, scaled_by


@registered
class DiLoCo(OuterStep):
    r"""Every `period` steps an outer optimizer steps from where the round started, along the mean displacement.

    With $x_0$ the parameters at the start of a round and $x_i$ those of worker $i$ after its $H$ steps,

    $$\Delta = \tfrac1n \sum_i (x_0 - x_i), \qquad x_0 \leftarrow \text{OuterOpt}(x_0, \Delta) .$$

    $\Delta$ is not divided by the workers' learning rate; in slow momentum it is. The workers' optimizer is AdamW in
    the paper; its state stays with each worker.

    SGD with `lr=1` is Local SGD, and with momentum too BMUF (Chen and Huo, ICASSP 2016); Adam as the outer optimizer is
    FedAdam (Reddi et al., ICLR 2021), and SGD on one worker Lookahead.
    Traffic: the base's, and per period its exact average: one all-reduce of what it sends.
    State: `anchor` ($x_0$) and the outer optimizer's, like the parameters; `Sharded` and `Offloaded` keep it elsewhere.

    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, arXiv:2311.08105,
    Algorithm 1.

    Args:
        base: the strategy between outer steps; with `Local()`, as in the paper, workers send nothing there.
        period: $H$, optimizer steps between outer steps; more sends less.
        outer: $\text{OuterOpt}$; the paper's is SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
        codec: compresses the differences from $x_0$ that are averaged; None sends the parameters as they are.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     outer = thinwire.OuterOptimizer("SGD", lr=0.5)
        ...     thinwire.attach(model, optimizer, thinwire.DiLoCo(period=2, outer=outer), comm=comm)
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)  # each round's mean displacement is 1
        [-1.0, -1.0]
    """

    base: Strategy = Local()
    period: int = 500
    outer: OuterOptimizer = OuterOptimizer("SGD", lr=0.7, momentum=0.9, nesterov=True)
    codec: Codec | None = None

    paper = "Douillard et al., DiLoCo, 2023, arXiv:2311.08105"
    limits = (
        "the outer learning rate and momentum are tuned together with the period: with SGD the effective learning rate "
        "is the optimizer's times lr / (1 - momentum)"
    )

    # An optimizer may use norms, and keeps numbers such as step counters.
    elementwise = False
    lr_factor = trait(
        lambda self: None if self.outer.momentum is None else scaled_by(self.base, self.outer.lr, self.outer.momentum)
    )

    def check_sharded(self) -> None:
        """Refuse an outer optimizer whose step on a part of the vector is another one than on all of it."""
        super().check_sharded()
        if not self.outer.is_elementwise():
            raise ConfigError(
                f"Sharded({self}): {self.outer.optimizer} does not treat every element by itself; use SGD or Adam"
            )

    def step_(self, state: MutableMapping[str, Tensor], start: Tensor, average: Tensor) -> None:
        """One step of the outer optimizer, whose gradient is the displacement of the average."""
        self.outer.step_(state["anchor"], start - average, state)
