# SPDX-License-Identifier: Apache-2.0
"""Sum gradients over a round of short local steps, then take one long step along their mean over workers."""

from functools import cached_property
from math import inf

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.core.replica.displacement import descend_
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, draw_key, sends_all
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_, mean_
from thinwire.methods.strategies.base import At, Strategy
from thinwire.methods.strategies.traits import Traits
from thinwire.registry import registered


@registered
class MinibatchLocalSGD(Strategy):
    r"""Sum gradients along `period` short local steps, then take one step along their mean from the round's start.

    With $\gamma$ the optimizer's learning rate, $\rho$ = `inner` and $x_r$ the parameters at the start of round $r$,

    $$x^i_{k+1} = x^i_k - \rho\gamma\, g_i(x^i_k) \ \text{ from } x^i_0 = x_r, \qquad
      x_{r+1} = x_r - \gamma\,\tfrac1n \sum_i \sum_{k<K} g_i(x^i_k).$$

    `inner=0` is minibatch SGD: all gradients are computed at one point, and a round is one step of $\gamma K$ along the
    mean of $nK$ of them, as AllReduce with gradient accumulation; workers do not drift, whatever their data. `inner=1`
    is Local SGD. Between them, `SlowMo(momentum=0, lr=1/inner)` is the same method, but cannot reach 0. Each gradient
    is weighted by the learning rate of its own step. Where workers run out of data, each step's gradients are averaged
    over those that still have some. With a `codec` $C$ the mean is that of the decoded sums,
    $\tfrac1n \sum_i C\bigl(\sum_k g_i\bigr)$.
    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and round. State: `gathered`, like the
    parameters but in fp32 at least (without a codec it is sent in their dtype), within a round `unit` and (unless
    `inner=0`) `begin` ($x_r$), and the state of the codec.

    Woodworth, Patel and Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020,
    arXiv:2006.04735. The optimizer must be plain SGD, because only then is the sum of its updates one of gradients.

    Args:
        period: $K$, steps in a round; more sends less, and needs a smaller learning rate unless `inner` is near 1.
        inner: $\rho$, the inner learning rate over the outer one; more makes better use of every gradient while workers
            agree, and drifts further where their data differ.
        codec: compresses the summed gradients; None sends them uncompressed.

    Example:
        Without inner steps a round of two steps is one step along the sum of both gradients, averaged over workers:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, thinwire.MinibatchLocalSGD(period=2, inner=0.0), comm=comm)
        ...     weights = []
        ...     for _ in range(4):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...         weights.append(model.weight.item())
        ...     return weights
        >>> thinwire.run_threads(2, train)
        [[0.0, -1.0, -1.0, -2.0], [0.0, -1.0, -1.0, -2.0]]
    """

    period: int = 8
    inner: float = 0.5
    codec: Codec | None = None

    paper = "Woodworth, Patel and Srebro, Minibatch vs Local SGD, NeurIPS 2020, arXiv:2006.04735"
    waits = (
        "every `period` steps all workers wait for the slowest one and for the all-reduce of the summed gradients; in "
        "between no worker waits"
    )
    limits = "plain SGD only; with a small `inner` steps are few and long: tune the learning rate with it"

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            reads_gradient=True,
            period=self.period,
            lr_factor=1.0 if sends_all(self.codec) else None,
            # A round starts where the last one did, so workers that start apart stay apart.
            needs_equal_start=True,
        )

    def __post_init__(self) -> None:
        """Check the types and the ranges."""
        if self.period < 1:
            raise ConfigError(
                f"period={self.period}: must be at least 1 step; use AllReduce() to communicate at every step"
            )
        if not 0 <= self.inner < inf:
            raise ConfigError(f"inner={self.inner}: must be finite and not negative; 0 is minibatch, 1 is Local SGD")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse codecs that sums cannot be compressed with, and any optimizer but plain SGD."""
        check_differences(self.codec)
        if optimizer is not None:
            if not isinstance(optimizer, SGD):
                raise ConfigError(
                    f"{type(optimizer).__name__} under {self}: its step is not along a sum of gradients; {_INSTEAD}"
                )
            for group in optimizer.param_groups:
                for name in ("momentum", "weight_decay", "maximize"):
                    if group[name]:
                        raise ConfigError(f"SGD({name}={group[name]}) under {self}: takes plain SGD; {_FIXES[name]}")

    def start(self, r: Replica) -> None:
        """Allocate the sum."""
        # In half precision a long sum would lose small gradients.
        r.state["gathered"] = torch.zeros_like(r.x, dtype=torch.promote_types(r.x.dtype, torch.float32))

    def before_step(self, r: Replica) -> None:
        """Add the gradient to the sum, and scale it by `inner` for the optimizer's own step."""
        if "unit" not in r.state:
            # A round starts. The sum is in units of this learning rate, so that most of a round's weights are exactly
            # 1. A rate of zero cannot be a unit; any positive number can replace it, because such a step moves nothing.
            lr = r.lr if isinstance(r.lr, Tensor) else torch.tensor(r.lr, dtype=torch.float64, device="cpu")
            r.state["unit"] = torch.where(lr > 0, lr, 1.0)
            if self.inner:
                r.state["begin"] = r.x.clone()
        # The mean at the end of the round divides by all workers; this step's gradients are of active ones only.
        weight = r.lr / r.state["unit"] * (r.comm.size / r.active)
        r.state["gathered"].add_(r.g.to(r.state["gathered"].dtype) * weight)
        if self.inner:
            # The optimizer itself then takes the short inner step.
            r.g.mul_(self.inner)
        else:
            r.g.zero_()

    def after_step(self, r: Replica) -> None:
        """The outer step, when the round is over."""
        if r.step % self.period == 0:
            self._end_round_(r)

    def restart(self, r: Replica) -> None:
        """Start a round at the parameters; sums of an earlier round belong to other parameters and are dropped."""
        # The residual of the codec stays: it is the part of earlier sums that has not been sent yet.
        for name in ("unit", "begin"):
            r.state.pop(name, None)
        r.state["gathered"].zero_()

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """The mean of the workers' parameters; at the end of a round, where the outer step along the sum leads."""
        if at == "outer":
            self._end_round_(r)
            return r.x
        if at == "end" and "unit" in r.state:
            # Without the codec, whose residual must not change here.
            mean = mean_(r.comm, r.state["gathered"].to(r.x.dtype, copy=True)).wait()
            return self._descend_(r.state.get("begin", r.x).clone(), mean, r.state["unit"])
        # Without inner steps the parameters are equal already.
        return mean_(r.comm, r.x.clone()).wait() if self.inner else r.x

    def _end_round_(self, r: Replica) -> None:
        """Take the outer step along the sum so far."""
        if "unit" not in r.state:
            return
        rate, total = r.state.pop("unit"), r.state["gathered"]
        if self.codec is None:
            mean = mean_(r.comm, total.to(r.x.dtype)).wait()
        else:
            key = draw_key(r.seed, r.step)
            mean = compressed_mean_(r.comm, total, self.codec, r.state, key=key, segments=r.segments).wait()
        if self.inner:
            r.x.copy_(r.state.pop("begin"))
        self._descend_(r.x, mean, rate)
        total.zero_()

    def _descend_(self, x: Tensor, mean: Tensor, rate: Tensor) -> Tensor:
        """The outer step, in place."""
        # A learning rate per parameter is a vector; a common one is faster as a plain number.
        return descend_(x, mean, rate if rate.dim() else float(rate))


_INSTEAD = (
    "average its parameters with LocalSGD(), step further with SlowMo(momentum=0, lr=...), or average gradients that "
    "were accumulated under no_sync() with AllReduce()"
)
_FIXES = {
    "momentum": "SlowMo(momentum=...) has one between rounds",
    "weight_decay": "put it into the loss, so that it is summed with the gradients",
    "maximize": "change the sign of the loss",
}
