# SPDX-License-Identifier: Apache-2.0
"""Average every few steps, and take a momentum step on the average."""

from collections.abc import MutableMapping
from dataclasses import replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.moments import fresh_optimizer, moment_names
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.methods.codecs.base import Codec
from thinwire.methods.strategies.base import Strategy, Traits
from thinwire.methods.strategies.local.local_sgd import Local, Period
from thinwire.methods.strategies.local.outer_step import WHOLE, OuterStep, Placement, scaled_by
from thinwire.registry import registered


@registered
class SlowMo(OuterStep):
    r"""Average every `period` steps, then take one momentum step on the average.

    With $x_0$ the parameters after the last slow step and $\gamma$ the mean of the learning rate since,

    $$u \leftarrow \beta u + \tfrac{1}{\gamma}(x_0 - \bar x), \qquad x_0 \leftarrow x_0 - \alpha \gamma u .$$

    While gradients are similar, the effective learning rate is $\alpha\gamma/(1-\beta)$.
    `momentum=0` is the base with exact averages; `period=1` under SGD is AllReduce with heavy-ball momentum.
    Traffic: the base's, and one exact average per period. State: `anchor` ($x_0$) and `slow` ($u$), like the
    parameters; for the round `lr_sum`, like the learning rate, and the number of steps, `num_steps`.

    Wang et al., SlowMo, ICLR 2020, arXiv:1910.00643, Algorithm 1.

    Args:
        base: the strategy between averages; with `Local()` workers send nothing between them.
        period: $\tau$, steps between averages; more sends less.
        momentum: $\beta$, in [0, 1); 0.2 to 0.8 is usual; it can be larger with more workers.
        lr: $\alpha$, the slow learning rate; 1 is usual.
        buffers: what a slow step does with the optimizer's state: "maintain" keeps it, "reset" clears it, "average"
            averages its moments over workers.
        exact: False uses each worker's own parameters as the average, and sends nothing at a slow step.
        codec: compresses the differences from $x_0$ that are averaged; None sends them uncompressed.

    Example:
        >>> import torch, thinwire
        >>> def train(comm):
        ...     model = torch.nn.ParameterList([torch.zeros(1)])
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.SlowMo(period=2), comm=comm)
        ...     for _ in range(4):
        ...         model[0].grad = torch.full_like(model[0], comm.rank)
        ...         optimizer.step()
        ...     return model[0].item()
        >>> thinwire.run_threads(2, train)  # averages alone end at -2
        [-2.5, -2.5]
    """

    base: Strategy = Local()
    period: Period = 12
    momentum: Annotated[float, Range("[0, 1)", "0.2 to 0.8 is usual")] = 0.5
    lr: Annotated[float, Range("(0, inf)", "1 is usual")] = 1.0
    buffers: Literal["maintain", "reset", "average"] = "maintain"
    exact: bool = True
    codec: Codec | None = None

    paper = "Wang et al., SlowMo, ICLR 2020, arXiv:1910.00643"
    limits = (
        "with too much momentum or too long a period training overshoots: the effective learning rate is the "
        "optimizer's times lr / (1 - momentum), so lower one of them"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            rounds=replace(found.rounds, optimizer_state=self.buffers),
            growing=("lr_sum",),
            lr_factor=scaled_by(self.base, self.codec, self.lr, self.momentum),
        )

    def __post_init__(self) -> None:
        super().__post_init__()

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check, and check that the optimizer's state can be reset or averaged if `buffers` needs it."""
        super().check(size, optimizer)
        if optimizer is not None and self.buffers != "maintain":
            (fresh_optimizer if self.buffers == "reset" else moment_names)(optimizer)

    def start(self, r: Replica, where: Placement = WHOLE) -> None:
        """Start the first round at the initial parameters, without slow momentum."""
        super().start(r, where)
        r.state["slow"] = torch.zeros_like(r.state["anchor"])

    def begin_round(self, r: Replica) -> None:
        """Reset the sum of learning rates and the number of steps, which may differ after `restart`."""
        r.state["lr_sum"] = r.state["anchor"].new_zeros((), dtype=torch.float64)
        r.state["num_steps"] = torch.zeros((), dtype=torch.int64, device="cpu")

    def after_step(self, r: Replica, where: Placement = WHOLE) -> None:
        """Run the base's hook; at the end of a period, take the slow step and start the next round."""
        r.state["lr_sum"] = r.state["lr_sum"] + where.lr_of(r)
        r.state["num_steps"] += 1
        super().after_step(r, where)
        if r.step % self.period == 0 and not r.postponed and self.buffers != "maintain":
            r.moments.forget() if self.buffers == "reset" else r.moments.average_(r.comm)

    def step_(self, state: MutableMapping[str, Tensor], start: Tensor, average: Tensor) -> None:
        """Take one step of slow momentum."""
        anchor, lr = state["anchor"], (state["lr_sum"] / int(state["num_steps"])).to(state["anchor"].dtype)
        if self.momentum == 0 and self.lr == 1:  # anchor - (anchor - average) would be rounded
            anchor.copy_(average)
            return
        # Where the learning rate was zero the displacement is zero too, so any positive divisor gives zero.
        state["slow"].mul_(self.momentum).addcdiv_(start - average, torch.where(lr > 0, lr, 1.0))
        anchor.addcmul_(state["slow"], lr, value=-self.lr)
