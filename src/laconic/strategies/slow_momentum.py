"""Average now and then, and take a momentum step on the average."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from laconic.comm.base import Work
from laconic.errors import ConfigError
from laconic.kinds import check_kinds
from laconic.replica import Replica
from laconic.strategies.base import Strategy
from laconic.strategies.local_sgd import Local, check_period


@dataclass(frozen=True)
class SlowMo(Strategy):
    r"""Average every `period` steps, then take one momentum step on the average.

    With $x_0$ the parameters after the last slow step and $\gamma$ the mean of the optimizer's learning rate over
    the round,

    $$u \leftarrow \beta u + \tfrac{1}{\gamma}(x_0 - \bar x), \qquad x_0 \leftarrow x_0 - \alpha \gamma u .$$

    `momentum=0, lr=1` is the base with exact averages (Local SGD over `Local()`); `period=1` under plain SGD is
    AllReduce with heavy-ball momentum; one worker with `momentum=0` is Lookahead. A round whose learning rate is
    zero moves nothing and lets $u$ decay. The optimizer's own state is kept as it is.
    Traffic: the base's, plus per period the base's exact average: one all-reduce of what the base sends, of the
    parameters over `Local()`, of nothing over `AllReduce()`. State: `anchor` ($x_0$) and `slow` ($u$), each the size
    of the parameters, and `lr_sum`, a number (as many as parameters, where parameter groups differ in it).

    Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, ICLR 2020,
    arXiv:1910.00643, Algorithm 1.

    Args:
        base: what happens between averages; `Local()` is silence.
        period: $\tau$, optimizer steps between slow steps; more says less.
        momentum: $\beta$, in [0, 1); 0.4 to 0.8 is usual, more workers bear more.
        lr: $\alpha$, the slow learning rate; 1 is usual.
    """

    base: Strategy = Local()
    period: int = 12
    momentum: float = 0.7
    lr: float = 1.0

    paper = "Wang et al., SlowMo, ICLR 2020, arXiv:1910.00643"
    waits = "every period steps, all wait for the slowest worker and for the parameters to travel; else as the base"
    limits = "tune the momentum: too much of it, or too long a period, overshoots"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        check_period(self.period)
        if isinstance(self.base, SlowMo):
            raise ConfigError(f"base={self.base}: one slow momentum at a time; use its base, {self.base.base}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must lie in [0, 1); 0.4 to 0.8 is usual")
        if not 0 < self.lr < inf:
            raise ConfigError(f"lr={self.lr}: the slow learning rate must be positive and finite; 1 is usual")

    @property
    def sends_gradients(self) -> bool:
        """As the base."""
        return self.base.sends_gradients

    @property
    def reads_gradient(self) -> bool:
        """As the base."""
        return self.base.reads_gradient

    def check(self, size: int) -> None:
        """As the base."""
        self.base.check(size)

    def start(self, r: Replica) -> None:
        """Remember where the first round begins."""
        self.base.start(r)
        r.state["anchor"] = r.x.clone()
        r.state["slow"] = torch.zeros_like(r.x)
        r.state["lr_sum"] = _nothing_like(r.x)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """As the base."""
        return self.base.on_gradient(r, part)

    def before_step(self, r: Replica) -> None:
        """As the base."""
        self.base.before_step(r)

    def after_step(self, r: Replica) -> None:
        """The base's part; then, when the period is over, the slow step."""
        self.base.after_step(r)
        r.state["lr_sum"] = r.state["lr_sum"] + r.lr
        if r.step % self.period:
            return
        self.base.average_(r)
        self._slow_step(r, r.state["lr_sum"] / self.period)
        r.state["lr_sum"] = _nothing_like(r.x)

    def _slow_step(self, r: Replica, lr: Tensor) -> None:
        anchor, slow = r.state["anchor"], r.state["slow"]
        if self.momentum == 0 and self.lr == 1:
            anchor.copy_(r.x)
            return
        # Nothing has moved where the learning rate was zero, so any positive divisor will do there.
        slow.mul_(self.momentum).add_((anchor - r.x) / torch.where(lr > 0, lr, 1.0))
        anchor.sub_(slow * lr, alpha=self.lr)
        r.x.copy_(anchor)

    def consensus(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.consensus(r)


def _nothing_like(x: Tensor) -> Tensor:
    """A sum of learning rates before the first, on the device of `x`."""
    return x.new_zeros((), dtype=torch.float64)
