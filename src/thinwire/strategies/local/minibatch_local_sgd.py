"""Gather gradients over a round of short steps, then take one long step along all of them."""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.errors import ConfigError
from thinwire.reduce.compressed_all_reduce import mean_
from thinwire.replica.displacement import descend_
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class MinibatchLocalSGD(Strategy):
    r"""Gather gradients along `period` short steps of one's own, then step from where the round began along their mean.

    With $\gamma$ the optimizer's learning rate, $\rho$ = `inner` and $x_r$ where round $r$ begins,

    $$x^i_{k+1} = x^i_k - \rho\gamma\, g_i(x^i_k) \ \text{ from } x^i_0 = x_r, \qquad
      x_{r+1} = x_r - \gamma\,\tfrac1n \sum_i \sum_{k<K} g_i(x^i_k).$$

    `inner=0` is minibatch SGD: all gradients are taken at one point, and a round is one step of $\gamma K$ along the
    mean of $nK$ of them, as AllReduce takes it on gradients that were accumulated; it has no drift, whatever the
    workers' data. `inner=1` is Local SGD. Between them, `SlowMo(momentum=0, lr=1/inner)` is the same method, but cannot
    reach 0. Each gradient counts with the learning rate of its own step; where workers run out of data, with
    the number of those that still have some.
    Traffic: $2\frac{n-1}{n}$ of the parameters per worker and round. State: `gathered`, like the parameters, and within
    a round `unit` and (unless `inner=0`) `begin` ($x_r$).

    Woodworth, Patel and Srebro, Minibatch vs Local SGD for Heterogeneous Distributed Learning, NeurIPS 2020,
    arXiv:2006.04735. The optimizer must be plain SGD: what other optimizers make of a gradient is not one.

    Args:
        period: $K$, steps in a round; more says less, and wants a smaller learning rate unless `inner` is near 1.
        inner: $\rho$, the inner learning rate over the outer one; more makes better use of every gradient while workers
            agree, and drifts further where their data differ.
    """

    period: int = 8
    inner: float = 0.5

    paper = "Woodworth, Patel and Srebro, Minibatch vs Local SGD, NeurIPS 2020, arXiv:2006.04735"
    waits = "every period steps, all wait for the slowest and for one vector to travel"
    limits = "plain SGD only; with little of inner, steps are few and long: the learning rate is tuned with it"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges."""
        check_kinds(self)
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; use AllReduce() to speak at every step")
        if not 0 <= self.inner < inf:
            raise ConfigError(f"inner={self.inner}: must be finite and not negative; 0 is minibatch, 1 is Local SGD")

    @property
    def reads_gradient(self) -> bool:
        """Yes: it gathers the worker's own gradients."""
        return True

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse any but plain SGD."""
        if not isinstance(optimizer, SGD):
            raise ConfigError(
                f"{type(optimizer).__name__} under {self}: a sum of gradients is no step of it; {_INSTEAD}"
            )
        for group in optimizer.param_groups:
            for name in ("momentum", "weight_decay", "maximize"):
                if group[name]:
                    raise ConfigError(f"SGD({name}={group[name]}) under {self}: takes plain SGD; {_FIXES[name]}")

    def start(self, r: Replica) -> None:
        """Allocate the sum."""
        r.zeros_state("gathered")

    def before_step(self, r: Replica) -> None:
        """Gather the gradient, and leave the optimizer its inner part."""
        if "unit" not in r.state:
            # A round begins. The sum is in units of this learning rate, in which most of a round's weights are 1;
            # a rate of zero has no use as a unit, and moves nothing whatever stands in its place.
            lr = r.lr if isinstance(r.lr, Tensor) else torch.tensor(r.lr, dtype=torch.float64)
            r.state["unit"] = torch.where(lr > 0, lr, 1.0)
            if self.inner:
                r.state["begin"] = r.x.clone()
        # Like a mean of gradients, the sum divides by the workers that still have data.
        weight = r.lr / r.state["unit"] * (r.comm.size / r.active)
        r.state["gathered"].add_(r.g * weight)
        if self.inner:
            r.g.mul_(self.inner)
        else:
            r.g.zero_()

    def after_step(self, r: Replica) -> None:
        """The outer step, when the round is over."""
        if r.step % self.period == 0:
            self.average_(r)

    def average_(self, r: Replica) -> None:
        """End the round here, with the outer step along what has been gathered."""
        if "unit" not in r.state:
            return
        rate, total = r.state.pop("unit"), r.state["gathered"]
        mean_(r.comm, total).wait()
        if self.inner:
            r.x.copy_(r.state.pop("begin"))
        descend_(r.x, total, rate if rate.dim() else float(rate))
        total.zero_()

    def consensus(self, r: Replica) -> Tensor:
        """The mean of the workers' parameters; without inner steps they are equal already."""
        return mean_(r.comm, r.x.clone()).wait() if self.inner else r.x


_INSTEAD = (
    "average its parameters with LocalSGD(), step further with SlowMo(momentum=0, lr=...), or average gradients that "
    "were accumulated under no_sync() with AllReduce()"
)
_FIXES = {
    "momentum": "SlowMo(momentum=...) has one between rounds",
    "weight_decay": "put it into the loss, so that it is gathered with the gradients",
    "maximize": "give the loss the other sign",
}
