"""Average now and then, and take a momentum step on the average."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import Codec, check_feedback
from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.replica.moments import made_anew, moments_of
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.local.local_sgd import Local, check_period, common_start, compressed_delta
from thinwire.strategies.local.means import all_gather_, part_of, reduce_scatter
from thinwire.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.validation import check_kinds

_MOMENTUM, _LR = 0.5, 1.0


@dataclass(frozen=True)
class SlowMo(Strategy):
    r"""Average every `period` steps, then take one momentum step on the average.

    With $x_0$ the parameters after the last slow step and $\gamma$ the mean of the optimizer's learning rate over
    the round,

    $$u \leftarrow \beta u + \tfrac{1}{\gamma}(x_0 - \bar x), \qquad x_0 \leftarrow x_0 - \alpha \gamma u .$$

    A round whose learning rate is zero moves nothing and lets $u$ decay. With `outer`, that optimizer takes the step
    instead, with $x_0 - \bar x$ as its gradient.

    `momentum=0, lr=1` is the base with exact averages (Local SGD over `Local()`), and with `buffers="average"` it is
    double averaging; `period=1` under plain SGD is AllReduce with heavy-ball momentum; one worker with `momentum=0` is
    Lookahead; `outer` SGD of rate 1 with momentum is BMUF, and AdamW under Nesterov's `OuterOptimizer()` is DiLoCo.
    Traffic: the base's, plus per period the base's exact average: one all-reduce of what the base sends, of the
    parameters over `Local()`, of nothing over `AllReduce()`. `shard` sends as much over `Local()`, and half an
    all-reduce more over others; `buffers="average"` one all-reduce of the optimizer's moments more; `exact=False`
    nothing; a `codec` its payload. State: `anchor` ($x_0$) and `slow` ($u$) or the outer optimizer's, each the size of
    the parameters (with `shard`, of a worker's part of them), `lr_sum`, a number (as many as parameters, where groups
    differ in it), and what the codec keeps.

    Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, ICLR 2020,
    arXiv:1910.00643, Algorithm 1. BMUF: Chen and Huo, ICASSP 2016. Double averaging: Yu et al., ICML 2019,
    arXiv:1905.03817. DiLoCo: Douillard et al., 2023, arXiv:2311.08105, Algorithm 1.

    Args:
        base: what happens between averages; over `Local()` workers send nothing there.
        period: $\tau$, optimizer steps between slow steps; more sends less.
        momentum: $\beta$, in [0, 1); 0.2 to 0.8 is usual, more workers bear more.
        lr: $\alpha$, the slow learning rate; 1 is usual.
        buffers: what becomes of the optimizer's own state at a slow step: "maintain" keeps it, "reset" forgets it,
            step counters too, "average" averages its moments over workers.
        exact: False takes each worker's own parameters for the average, and sends nothing at a slow step.
        outer: an optimizer for the slow step instead of momentum.
        shard: every worker keeps and moves its part of the slow state alone.
        device: "cpu" keeps the slow state in the host's memory; None keeps it with the parameters.
        codec: for how far parameters have come from $x_0$, so that $\bar x$ is $x_0$ and the mean of what codes tell;
            over `Local()` alone. None sends the parameters as they are.
    """

    base: Strategy = Local()
    period: int = 12
    momentum: float = _MOMENTUM
    lr: float = _LR
    buffers: Literal["maintain", "reset", "average"] = "maintain"
    exact: bool = True
    outer: OuterOptimizer | None = None
    shard: bool = False
    device: Literal["cpu"] | None = None
    codec: Codec | None = None

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
            raise ConfigError(f"momentum={self.momentum}: must lie in [0, 1); 0.2 to 0.8 is usual")
        if not 0 < self.lr < inf:
            raise ConfigError(f"lr={self.lr}: the slow learning rate must be positive and finite; 1 is usual")
        if self.outer is not None and (self.momentum, self.lr) != (_MOMENTUM, _LR):
            raise ConfigError(
                f"outer={self.outer} beside momentum={self.momentum}, lr={self.lr}: the slow step is the outer "
                "optimizer's alone; say them in OuterOptimizer(...)"
            )
        if self.shard and not self.exact:
            raise ConfigError("shard=True, exact=False: workers without an average have nothing to share out; keep one")
        if self.codec is not None and (self.base != Local() or self.shard or not self.exact):
            raise ConfigError(
                f"codec={self.codec} with base={self.base}, shard={self.shard}, exact={self.exact}: what is coded is "
                "how far workers have come alone from a common start; use base=Local(), shard=False, exact=True"
            )

    @property
    def sends_gradients(self) -> bool:
        """As the base."""
        return self.base.sends_gradients

    @property
    def reads_gradient(self) -> bool:
        """As the base."""
        return self.base.reads_gradient

    def check(self, size: int) -> None:
        """As the base; and refuse a codec that drops what it cannot encode."""
        check_feedback(self.codec)
        self.base.check(size)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse one whose state cannot be reset or averaged where it is to be, and as the base."""
        self.base.check_optimizer(optimizer)
        if self.buffers == "reset":
            made_anew(optimizer)
        if self.buffers == "average":
            moments_of(optimizer)

    def start(self, r: Replica) -> None:
        """Begin the first round, without slow momentum, where training begins."""
        self.base.start(r)
        exact = torch.promote_types(r.x.dtype, torch.float32)
        # A codec encodes differences from the anchor, which must then be equal on all ranks.
        start = r.x if self.codec is None else common_start(r)
        # Tensors without data, as `explain` uses them, cannot leave their device.
        home = r.x.device if self.device is None or r.x.is_meta else torch.device(self.device)
        r.state["anchor"] = self._shard_of(r, start).to(home, exact, copy=True)
        if self.outer is None:
            r.state["slow"] = torch.zeros_like(r.state["anchor"])
            r.state["lr_sum"] = torch.zeros((), dtype=torch.float64, device=home)

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """As the base."""
        return self.base.on_gradient(r, part)

    def before_step(self, r: Replica) -> None:
        """As the base."""
        self.base.before_step(r)

    def after_step(self, r: Replica) -> None:
        """The base's part; then, when the period is over, the slow step, from which the next round begins."""
        self.base.after_step(r)
        anchor = r.state["anchor"]
        if self.outer is None:
            lr = r.lr
            r.state["lr_sum"] = r.state["lr_sum"] + (
                self._shard_of(r, lr).to(anchor.device) if isinstance(lr, Tensor) else lr
            )
        if r.step % self.period:
            return

        average = self._average(r)
        if self.outer is None and self.momentum == 0 and self.lr == 1:
            # The average itself, as anchor - (anchor - average) would round.
            anchor.copy_(average)
        else:
            # The round began at the anchor as the parameters' dtype holds it, unless differences were taken to it.
            begun = anchor if self.codec is not None else anchor.to(r.x.dtype)
            self._move_(anchor, begun - average, r.state)

        if self.shard:
            all_gather_(r.comm, anchor.to(r.x), r.x)
        else:
            r.x.copy_(anchor)
        if self.outer is None:
            r.state["lr_sum"] = torch.zeros((), dtype=torch.float64, device=anchor.device)
        if self.buffers == "reset":
            r.moments.forget()
        if self.buffers == "average":
            r.moments.average_(r.comm)

    def consensus(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.consensus(r)

    def _average(self, r: Replica) -> Tensor:
        """The workers' average, where the slow state lies, and as much of it as this worker has slow state for."""
        anchor = r.state["anchor"]
        if self.codec is not None:
            return anchor + compressed_delta(r, anchor, self.codec).to(anchor.device)
        if self.shard and type(self.base).average_ is Strategy.average_:
            # A plain mean can stop half-way: the first half of an all-reduce leaves each worker its part.
            return reduce_scatter(r.comm, r.x).to(anchor)
        if self.exact:
            self.base.average_(r)
        else:
            # Messages in flight may still be read from the parameters, which the slow step is about to change.
            r.wait_pending()
        return self._shard_of(r, r.x).to(anchor)

    def _move_(self, anchor: Tensor, displacement: Tensor, state: MutableMapping[str, Tensor]) -> None:
        """The slow step: from where the round began, given how far that is from the average."""
        if self.outer is not None:
            self.outer.step_(anchor, displacement, state)
            return
        slow, lr = state["slow"], (state["lr_sum"] / self.period).to(anchor.dtype)
        # Nothing has moved where the learning rate was zero, so any positive divisor will do there.
        slow.mul_(self.momentum).addcdiv_(displacement, torch.where(lr > 0, lr, 1.0))
        anchor.addcmul_(slow, lr, value=-self.lr)

    def _shard_of(self, r: Replica, x: Tensor) -> Tensor:
        """What of a vector like the parameters this worker keeps slow state for."""
        return part_of(r.comm, x) if self.shard else x
