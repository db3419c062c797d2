# SPDX-License-Identifier: Apache-2.0
"""Sum gradients over a round of short local steps, then take one step along their mean over workers."""

from typing import Annotated

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.core.replica.displacement import descend_
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec, check_differences, draw_key, sends_all
from thinwire.methods.reduce.compressed_all_reduce import compressed_mean_, mean_
from thinwire.methods.strategies.base import At, Strategy, Traits
from thinwire.registry import registered


@registered
class MinibatchLocalSGD(Strategy):
    r"""Sum gradients along `period` short local steps, then take one step along their mean from the round's start.

    With $\gamma$ the optimizer's learning rate, $\rho$ = `inner` and $x_r$ the parameters at the start of round $r$,

    $$x^i_{k+1} = x^i_k - \rho\gamma\, g_i(x^i_k) \ \text{ from } x^i_0 = x_r, \qquad
      x_{r+1} = x_r - \gamma\,\tfrac1n \sum_i \sum_{k<K} g_i(x^i_k).$$

    `inner=0` is minibatch SGD: all gradients are computed at one point, and a round is one step of $\gamma K$ along the
    mean of $nK$ gradients, as AllReduce with gradient accumulation; workers do not drift, whatever their data.
    `inner=1` is Local SGD. Values between are equal to `SlowMo(momentum=0, lr=1/inner)`.

    Each gradient is weighted by the learning rate of its own step. If some workers run out of data, each step's
    gradients are averaged over the others. With a `codec` $C$ the mean is $\tfrac1n \sum_i C\bigl(\sum_k g_i\bigr)$.
    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and round. State: the sum `gathered`,
    like the parameters in fp32 at least, and the codec's state; within a round `unit` and (unless `inner=0`) `begin`
    ($x_r$).

    Woodworth, Patel and Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020,
    arXiv:2006.04735. The optimizer must be SGD without momentum, whose updates are multiples of the gradient.

    Args:
        period: $K$, steps in a round; more sends less, and needs a smaller learning rate unless `inner` is near 1.
        inner: $\rho$, the ratio of the inner learning rate to the outer one; more makes better use of similar
            gradients, and lets workers with different data drift further apart.
        codec: compresses the summed gradients; None sends them uncompressed.

    Example:
        With `inner=0` a round of two steps is one step along the sum of both gradients, averaged over workers:

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

    period: Annotated[int, Range("1..", "Use AllReduce() to communicate at every step")] = 8
    inner: Annotated[float, Range("[0, inf)", "0 is minibatch, 1 is Local SGD")] = 0.5
    codec: Codec | None = None

    paper = "Woodworth, Patel and Srebro, Minibatch vs Local SGD, NeurIPS 2020, arXiv:2006.04735"
    waits = (
        "every `period` steps all workers wait for the slowest one and for the all-reduce of the summed gradients; in "
        "between no worker waits"
    )
    limits = "plain SGD only; tune the learning rate together with `inner`, since small values take few long steps"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            reads_gradient=True,
            period=self.period,
            lr_factor=1.0 if sends_all(self.codec) else None,
            # Only sums of gradients are averaged, so parameters that start unequal stay unequal.
            needs_equal_start=True,
        )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the codec can compress sums, and that the optimizer is SGD without momentum."""
        check_differences(self.codec)
        if optimizer is not None:
            if not isinstance(optimizer, SGD):
                raise ConfigError(
                    f"{type(optimizer).__name__} under {self}: its step is not a multiple of the gradient. {_INSTEAD}"
                )
            for group in optimizer.param_groups:
                for name in ("momentum", "weight_decay", "maximize"):
                    if group[name]:
                        raise ConfigError(f"SGD({name}={group[name]}) under {self}: needs plain SGD. {_FIXES[name]}")

    def start(self, r: Replica) -> None:
        """Allocate the sum."""
        # In half precision a long sum would lose small gradients.
        r.state["gathered"] = torch.zeros_like(r.x, dtype=torch.promote_types(r.x.dtype, torch.float32))

    def before_step(self, r: Replica) -> None:
        """Add the gradient to the sum, and scale it by `inner` for the optimizer's own step."""
        if "unit" not in r.state:
            # A round starts. The sum is in units of this learning rate, so that most weights of a round are exactly 1.
            # A rate of zero is replaced with any positive number, because such a step changes no parameter.
            lr = r.lr if isinstance(r.lr, Tensor) else torch.tensor(r.lr, dtype=torch.float64, device="cpu")
            r.state["unit"] = torch.where(lr > 0, lr, 1.0)
            if self.inner:
                r.state["begin"] = r.x.clone()
        # The mean at the end of the round divides by all workers, but only active ones have a gradient.
        weight = r.lr / r.state["unit"] * (r.comm.size / r.active)
        r.state["gathered"].add_(r.g.to(r.state["gathered"].dtype) * weight)
        if self.inner:
            # The optimizer itself then takes the short inner step.
            r.g.mul_(self.inner)
        else:
            r.g.zero_()

    def after_step(self, r: Replica) -> None:
        """Take the outer step at the end of a round."""
        if r.step % self.period == 0:
            self._end_round_(r)

    def restart(self, r: Replica) -> None:
        """Start a round at the parameters, without the sums of the last one."""
        # The residual stays: it is the unsent part of earlier sums.
        for name in ("unit", "begin"):
            r.state.pop(name, None)
        r.state["gathered"].zero_()

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the mean of the workers' parameters, at the end of a round after the outer step."""
        if at == "outer":
            self._end_round_(r)
            return r.x
        if at == "end" and "unit" in r.state:
            # Without the codec, whose residual must not change here.
            mean = mean_(r.comm, r.state["gathered"].to(r.x.dtype, copy=True)).wait()
            return self._descend_(r.state.get("begin", r.x).clone(), mean, r.state["unit"])
        # With `inner=0` the parameters are equal already.
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
            mean = compressed_mean_(r.comm, total, self.codec, r.state, key=key, segments=r.segments, like=r.x).wait()
        if self.inner:
            r.x.copy_(r.state.pop("begin"))
        self._descend_(r.x, mean, rate)
        total.zero_()

    def _descend_(self, x: Tensor, mean: Tensor, rate: Tensor) -> Tensor:
        """Take the outer step, in place."""
        # A learning rate per parameter is a vector; a common one is faster as a plain number.
        return descend_(x, mean, rate if rate.dim() else float(rate))


_INSTEAD = (
    "Use LocalSGD() or SlowMo(momentum=0, lr=...) to average parameters, or AllReduce() with no_sync() to accumulate "
    "gradients"
)
_FIXES = {
    "momentum": "Use SlowMo(momentum=...) for a momentum between rounds",
    "weight_decay": "Add it to the loss, so that it is summed with the gradients",
    "maximize": "Change the sign of the loss",
}
