"""Average every few steps, and take a momentum step on the average."""

from collections.abc import MutableMapping
from math import inf
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.codecs.base import Codec, check_feedback
from thinwire.errors import ConfigError
from thinwire.kernels.decisions import device_for
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.registry import registered
from thinwire.replica.moments import fresh_optimizer, moment_names
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy, trait
from thinwire.strategies.local.local_sgd import Local, check_period, common_start, compressed_delta
from thinwire.strategies.local.means import all_gather_, own_shard, reduce_scatter
from thinwire.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.strategies.wrapper import Wrapper

_MOMENTUM, _LR = 0.5, 1.0


@registered
class SlowMo(Wrapper):
    r"""Average every `period` steps, then take one momentum step on the average.

    With $x_0$ the parameters after the last slow step and $\gamma$ the mean of the optimizer's learning rate over
    the round,

    $$u \leftarrow \beta u + \tfrac{1}{\gamma}(x_0 - \bar x), \qquad x_0 \leftarrow x_0 - \alpha \gamma u .$$

    A round whose learning rate is zero moves nothing, and $u$ decays. With `outer`, that optimizer takes the step
    instead, with $x_0 - \bar x$ as its gradient.

    `momentum=0, lr=1` is the base with exact averages (Local SGD over `Local()`), and with `buffers="average"` it is
    double averaging; `period=1` under plain SGD is AllReduce with heavy-ball momentum; one worker with `momentum=0` is
    Lookahead; `outer` SGD of rate 1 with momentum is BMUF, and AdamW under Nesterov's `OuterOptimizer()` is DiLoCo.
    Traffic: the base's, plus per period the base's exact average: one all-reduce of what the base sends, of the
    parameters over `Local()`, of nothing over `AllReduce()`. `shard` sends as much over `Local()`, and half an
    all-reduce more over others; `buffers="average"` one all-reduce of the optimizer's moments more; `exact=False`
    nothing; a `codec` its payload. State: `anchor` ($x_0$) and `slow` ($u$) or the outer optimizer's, each the size of
    the parameters (with `shard`, of a worker's part of them), `lr_sum`, a number (as many as parameters, where groups
    differ in it), and the state of the codec.

    Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum, ICLR 2020,
    arXiv:1910.00643, Algorithm 1. BMUF: Chen and Huo, ICASSP 2016. Double averaging: Yu et al., ICML 2019,
    arXiv:1905.03817. DiLoCo: Douillard et al., 2023, arXiv:2311.08105, Algorithm 1.

    Args:
        base: the strategy between averages; with `Local()` workers send nothing there.
        period: $\tau$, optimizer steps between slow steps; more sends less.
        momentum: $\beta$, in [0, 1); 0.2 to 0.8 is usual; it can be larger with more workers.
        lr: $\alpha$, the slow learning rate; 1 is usual.
        buffers: what happens to the optimizer's own state at a slow step: "maintain" keeps it, "reset" clears it,
            step counters too, "average" averages its moments over workers.
        exact: False takes each worker's own parameters as the average, and sends nothing at a slow step.
        outer: an optimizer for the slow step instead of momentum.
        shard: every worker keeps only its part of the slow state, and takes the slow step on that part.
        device: "cpu" keeps the slow state in the host's memory; None keeps it with the parameters.
        codec: compresses the differences from $x_0$, so that $\bar x$ is $x_0$ plus the mean of the compressed
            differences; only with the base `Local()`. None sends the parameters as they are.

    Example:
        The first slow step is the average; from the second one on, momentum carries the workers further.

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.SlowMo(period=2, momentum=0.5), comm=comm)
        ...     weights = []
        ...     for _ in range(6):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...         weights.append(model.weight.item())
        ...     return weights[1::2]
        >>> thinwire.run_threads(2, train)
        [[-1.0, -2.5, -4.25], [-1.0, -2.5, -4.25]]
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
    waits = (
        "every `period` steps all workers wait for the slowest one and for the all-reduce of the parameters; in "
        "between as its base"
    )
    limits = "tune the momentum: too much of it, or too long a period, overshoots"

    moves_parameters = True
    has_period = True
    elementwise = trait(
        lambda self: self.base.elementwise and not self.shard and self.outer is None and self.buffers == "maintain"
    )

    def __post_init__(self) -> None:
        """Check the types and the ranges."""
        check_period(self.period)
        if isinstance(self.base, SlowMo):
            raise ConfigError(f"base={self.base}: one slow momentum at a time; use its base, {self.base.base}")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum={self.momentum}: must lie in [0, 1); 0.2 to 0.8 is usual")
        if not 0 < self.lr < inf:
            raise ConfigError(f"lr={self.lr}: the slow learning rate must be positive and finite; 1 is usual")
        if self.outer is not None and (self.momentum, self.lr) != (_MOMENTUM, _LR):
            raise ConfigError(
                f"outer={self.outer} with momentum={self.momentum}, lr={self.lr}: the outer optimizer takes the slow "
                "step; give them to OuterOptimizer(...)"
            )
        if self.shard and not self.exact:
            raise ConfigError("shard=True, exact=False: without an average there is nothing to shard; keep one of them")
        if self.codec is not None and (self.base != Local() or self.shard or not self.exact):
            raise ConfigError(
                f"codec={self.codec} with base={self.base}, shard={self.shard}, exact={self.exact}: a codec compresses "
                "each worker's own difference from a common start; use base=Local(), shard=False, exact=True"
            )

    def check(self, size: int) -> None:
        """As the base; and refuse a codec that drops what it cannot encode."""
        check_feedback(self.codec)
        super().check(size)
        if not self.exact and not self.base.holds_average(size):
            raise ConfigError(
                f"exact=False with base={self.base} and {size} workers: a worker's own parameters are not its estimate "
                "of the average there, as a part of it is in flight, or the base refers to a point that all workers "
                "have in common; use exact=True"
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """As the base; and refuse one whose state cannot be reset or averaged, where `buffers` asks for that."""
        super().check_optimizer(optimizer)
        if self.buffers == "reset":
            fresh_optimizer(optimizer)
        if self.buffers == "average":
            moment_names(optimizer)

    def start(self, r: Replica) -> None:
        """Start the first round at the initial parameters, without slow momentum."""
        super().start(r)
        exact = torch.promote_types(r.x.dtype, torch.float32)
        # Slow steps start at the anchor, which must be equal on all ranks: workers that start apart would stay so.
        start = r.x if self.codec is None else common_start(r)
        if self.codec is None and self.exact and not r.equal_start:
            start = mean_(r.comm, r.x.clone()).wait()
        home = device_for(r.x, self.device)
        r.state["anchor"] = self._shard_of(r, start).to(home, exact, copy=True)
        if self.outer is None:
            r.state["slow"] = torch.zeros_like(r.state["anchor"])
            self._begin_round(r)

    def after_step(self, r: Replica) -> None:
        """The base's hook; then, when the period is over, the slow step, from which the next round starts."""
        super().after_step(r)
        anchor = r.state["anchor"]
        if self.outer is None:
            lr = r.lr
            r.state["lr_sum"] = r.state["lr_sum"] + (
                self._shard_of(r, lr).to(anchor.device) if isinstance(lr, Tensor) else lr
            )
            r.state["num_steps"] += 1
        if r.step % self.period:
            return

        average = self._average(r)
        if self.outer is None and self.momentum == 0 and self.lr == 1:
            # The average itself, because anchor - (anchor - average) would be rounded.
            anchor.copy_(average)
        else:
            # The round started at the anchor rounded to the parameters' dtype. Only compressed differences are taken
            # from the anchor itself.
            start = anchor if self.codec is not None else anchor.to(r.x.dtype)
            self._move_(anchor, start - average, r.state)

        if self.shard:
            all_gather_(r.comm, anchor.to(r.x), r.x)
        else:
            r.x.copy_(anchor)
        self.base.restart(self.inner(r))
        if self.outer is None:
            self._begin_round(r)
        if self.buffers == "reset":
            r.moments.forget()
        if self.buffers == "average":
            r.moments.average_(r.comm)

    def restart(self, r: Replica) -> None:
        """As the base; and start the round at the parameters."""
        super().restart(r)
        r.state["anchor"].copy_(self._shard_of(r, r.x))
        if self.outer is None:
            self._begin_round(r)

    def _begin_round(self, r: Replica) -> None:
        # Steps are counted, because a round may be shorter than the period: the first one of a fragment that is ahead,
        # and one that begins at parameters set from outside.
        r.state["lr_sum"] = torch.zeros((), dtype=torch.float64, device=r.state["anchor"].device)
        r.state["num_steps"] = torch.zeros((), dtype=torch.int64)

    def _average(self, r: Replica) -> Tensor:
        """The workers' average, or this worker's shard of it, on the device of the slow state."""
        anchor = r.state["anchor"]
        if self.codec is not None:
            return anchor + compressed_delta(r, anchor, self.codec).to(anchor.device)
        if self.shard and type(self.base).average_ is Strategy.average_:
            # A plain mean needs only the first half of an all-reduce here; the second follows after the slow step.
            return reduce_scatter(r.comm, r.x).to(anchor)
        if self.exact:
            self.base.average_(self.inner(r))
        else:
            # Messages in flight may still read the parameters, which the slow step is about to change.
            r.wait_pending()
        return self._shard_of(r, r.x).to(anchor)

    def _move_(self, anchor: Tensor, displacement: Tensor, state: MutableMapping[str, Tensor]) -> None:
        """The slow step of the anchor, given the start of the round minus the average at its end."""
        if self.outer is not None:
            self.outer.step_(anchor, displacement, state)
            return
        slow, lr = state["slow"], (state["lr_sum"] / int(state["num_steps"])).to(anchor.dtype)
        # Where the learning rate was zero the displacement is zero too, so any positive divisor gives zero.
        slow.mul_(self.momentum).addcdiv_(displacement, torch.where(lr > 0, lr, 1.0))
        anchor.addcmul_(slow, lr, value=-self.lr)

    def _shard_of(self, r: Replica, x: Tensor) -> Tensor:
        """The part of a vector like the parameters that this worker keeps slow state for."""
        return own_shard(r.comm, x) if self.shard else x
