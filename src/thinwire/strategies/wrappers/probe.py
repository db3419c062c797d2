"""Measure, now and then, how much workers' gradients differ."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy
from thinwire.strategies.gradients.all_reduce import AllReduce
from thinwire.strategies.local.local_sgd import Local, LocalSGD
from thinwire.strategies.wrappers.heterogeneity import NAMES, estimate
from thinwire.validation import check_kinds


@dataclass(frozen=True)
class Probe(Strategy):
    r"""Do as the base does; at two successive exchanges in `every`, note how each worker deviates from the mean.

    An exchange is of gradients, where the base sends them; over `LocalSGD`, or over `Local` below slow momentum, it is
    an average, and how far a worker has moved since the last, divided by the sum of its learning rates, is the mean of
    its gradients on the way. With $e_i = g_i - \bar g$ and $e_i'$ the same one exchange before,

    $$\zeta^2 \approx \tfrac1n\sum_i\langle e_i, e_i'\rangle, \qquad
      \sigma^2 \approx \tfrac{1}{n-1}\sum_i\big(\tfrac12|e_i|^2 + \tfrac12|e_i'|^2 - \langle e_i, e_i'\rangle\big),
      \qquad |\nabla F|^2 \approx |\bar g|^2 - \tfrac1n\sigma^2,$$

    without bias where $\nabla F_i$ hardly changes between the two. Noise is that of one worker's gradient at one step
    (an average over $K$ steps has a $K$-th of it). Means of them, the recent ones counting more, are noted in
    `Replica.metrics` as `gradient_dissimilarity`, `gradient_noise` and `gradient_square`; `recommend` reads them.
    Training is not changed by a bit.
    Traffic: the base's, and a sum of three numbers of 8 bytes in `every` exchanges. State: `probe.deviation` and
    `probe.earlier`, each like the parameters (over averages `probe.anchor` too), and a few numbers.

    Args:
        base: what is looked at.
        every: exchanges between two looks; more costs less.
        keep: what the means keep of themselves at each look, in [0, 1); more is steadier and slower.
    """

    base: Strategy = AllReduce()
    every: int = 20
    keep: float = 0.9

    waits = "as the base, and at each look once more for three numbers"
    limits = "over averages the optimizer must be plain SGD; under a GradScaler only the figures' ratios mean anything"

    def __post_init__(self) -> None:
        """Check the kinds and the ranges, and that the base lets one see deviations."""
        check_kinds(self)
        if self.every < 2:
            raise ConfigError(f"every={self.every}: a look takes two successive exchanges; must be at least 2")
        if not 0 <= self.keep < 1:
            raise ConfigError(f"keep={self.keep}: must lie in [0, 1); 0.9 is a mean over about ten looks")
        if isinstance(self.base, LocalSGD) and (self.base.node_size > 1 or self.base.weights != "equal"):
            raise ConfigError(f"base={self.base}: looks at plain means of all; use LocalSGD without nodes and weights")
        if isinstance(self.base, Probe) or not (self.base.sends_gradients or isinstance(self.base, LocalSGD | Local)):
            raise ConfigError(
                f"base={self.base}: neither sends gradients nor ends rounds with a plain mean; put the probe inside, "
                "as in SlowMo(base=Probe(base=Local())), or look at AllReduce() or LocalSGD() for some steps"
            )

    @property
    def sends_gradients(self) -> bool:
        """As the base."""
        return self.base.sends_gradients

    @property
    def reads_gradient(self) -> bool:
        """As the base."""
        return self.base.reads_gradient

    @property
    def moves_parameters(self) -> bool:
        """As the base: looking moves nothing."""
        return self.base.moves_parameters

    def check(self, size: int) -> None:
        """As the base."""
        self.base.check(size)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """As the base; over averages refuse what does not move along the gradient."""
        self.base.check_optimizer(optimizer)
        plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
        if not self.sends_gradients and not plain:
            raise ConfigError(
                f"{type(optimizer).__name__} under {self}: gradients are read off how far workers move, which takes "
                "SGD without momentum; look at AllReduce() for some steps instead"
            )

    def start(self, r: Replica) -> None:
        """Make room for two deviations, and over averages for where a round begins."""
        self.base.start(r)
        r.zeros_state("probe.deviation")
        r.zeros_state("probe.earlier")
        if not self.sends_gradients:
            r.zeros_state("probe.anchor")
        r.state["probe.means"] = torch.zeros(4, dtype=torch.float64, device=r.x.device)
        r.state["probe.square"] = torch.zeros((), dtype=torch.float64, device=r.x.device)
        r.state["probe.half"] = torch.zeros((), dtype=torch.bool)
        if not self.sends_gradients:
            r.state["probe.rounds"] = torch.zeros((), dtype=torch.int64)
            self._begin_round(r)

    # The hooks below read as two stories. Where the base sends gradients, `on_gradient` takes each part's deviation as
    # its mean arrives, and `before_step` finds them complete. Over averages, `before_step` and `after_step` follow how
    # far a worker moves, and `_end_round` takes the deviation when the base averages.

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """As the base; at an exchange that is looked at, keep the difference to the mean."""
        # Without all workers the mean is over others than before, and the two deviations do not compare.
        if self._place(r.step) == 0 or r.active < r.comm.size:
            return self.base.on_gradient(r, part)
        # The mean takes the gradient's place, so this worker's own is copied first.
        deviation, square = r.state["probe.deviation"][part], r.state["probe.square"]
        deviation.copy_(r.g[part])
        work = self.base.on_gradient(r, part)
        if work is None:
            raise ConfigError(f"base={self.base}: exchanges nothing while the backward pass runs; look at AllReduce()")

        def subtract(mean: Tensor) -> Tensor:
            # Parts come from the end of the vector: with the first of them the sum begins anew.
            if part.stop == r.x.numel():
                square.zero_()
            square.add_(r.g[part].square().sum(dtype=torch.float64))
            deviation.sub_(r.g[part])
            return mean

        return work.then(subtract)

    def before_step(self, r: Replica) -> None:
        """As the base; where it sends gradients, all deviations of this exchange are there now."""
        if self.sends_gradients:
            if r.comm.size > 1 and r.active == r.comm.size:
                self._look(r, self._place(r.step))
        elif not r.state["probe.steps"]:
            r.state["probe.anchor"].copy_(r.x)
        self.base.before_step(r)

    def after_step(self, r: Replica) -> None:
        """As the base; over averages count the step, and end the round with the base's average."""
        if self.sends_gradients:
            self.base.after_step(r)
            return
        r.state["probe.lr_sum"] = r.state["probe.lr_sum"] + r.lr
        r.state["probe.steps"] += 1
        if isinstance(self.base, LocalSGD) and (r.step % self.base.period == 0 or r.step <= self.base.warmup_steps):
            self._end_round(r, self.base.after_step)
        else:
            self.base.after_step(r)

    def average_(self, r: Replica) -> None:
        """As the base; over averages this ends the round, unless none has begun."""
        if self.sends_gradients or not r.state["probe.steps"]:
            self.base.average_(r)
        else:
            self._end_round(r, self.base.average_)

    def consensus(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.consensus(r)

    def _begin_round(self, r: Replica) -> None:
        r.state["probe.lr_sum"] = torch.zeros((), dtype=torch.float64)
        r.state["probe.steps"] = torch.zeros((), dtype=torch.int64)

    def _end_round(self, r: Replica, average_: Callable[[Replica], None]) -> None:
        """Average as the base does, and keep by how much the mean of this worker's gradients deviates."""
        place = self._place(int(r.state["probe.rounds"]))
        if place == 0 or r.comm.size == 1:
            average_(r)
        else:
            deviation, lr = r.state["probe.deviation"].copy_(r.x), r.state["probe.lr_sum"]
            average_(r)
            per_lr = torch.where(lr > 0, 1 / lr, 0.0)
            # Steps go against the gradient: who has come further than the mean had the larger one.
            deviation.sub_(r.x).mul_(-per_lr)
            r.state["probe.square"] = r.state["probe.anchor"].sub_(r.x).mul_(per_lr).square().sum(dtype=torch.float64)
            self._look(r, place)
        r.state["probe.rounds"] += 1
        self._begin_round(r)

    def _place(self, exchanges: int) -> int:
        """1 at the first exchange of a look, 2 at the second, 0 elsewhere; `exchanges` were done before."""
        return max(0, exchanges % self.every - (self.every - 3))

    def _look(self, r: Replica, place: int) -> None:
        """Keep the first deviation of a look; at the second, estimate from both."""
        if place == 0:
            return
        now, earlier = r.state["probe.deviation"], r.state["probe.earlier"]
        # A first exchange without all workers was left out, and then there is nothing to compare the second with.
        complete = place == 2 and bool(r.state["probe.half"])
        r.state["probe.half"].fill_(place == 1)
        if place == 1:
            earlier.copy_(now)
        if not complete:
            return
        pairs = ((now, now), (earlier, earlier), (now, earlier))
        sums = r.comm.all_reduce_(torch.stack([(x * y).sum(dtype=torch.float64) for x, y in pairs])).wait()
        steps = r.state.get("probe.steps", torch.ones(()))
        found = estimate(sums, r.state["probe.square"], r.comm.size, float(steps))
        # Means over looks, the first element counting them as the others are counted: dividing by it corrects for
        # having begun at zero.
        means = r.state["probe.means"].mul_(self.keep)
        means.add_(torch.cat([torch.ones_like(found[:1]), found]))
        for name, mean in zip(NAMES, means[1:] / means[0], strict=True):
            r.metrics[name] = mean
