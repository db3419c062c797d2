# SPDX-License-Identifier: Apache-2.0
"""Measure from time to time how much workers' gradients differ."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import At, Strategy, Traits, codecs_of, nested
from thinwire.methods.strategies.gradients.all_reduce import AllReduce
from thinwire.methods.strategies.wrapper import Wrapper
from thinwire.methods.strategies.wrappers.heterogeneity import NAMES, estimate
from thinwire.registry import registered


@registered
class Probe(Wrapper):
    r"""Wrap a strategy, the base, and estimate gradient noise and the dissimilarity of workers' gradients.

    Each measurement uses two successive exchanges out of `every`. If the base sends gradients, an exchange is their
    all-reduce. With `LocalSGD`, or with `Local` inside slow momentum, an exchange is an average of the parameters: the
    change of a worker's parameters since the last exchange, divided by the sum of its learning rates, gives the mean of
    its gradients. With $g_i$ the gradient of worker $i$, $\bar g$ the mean over $n$ workers, $e_i = g_i - \bar g$, and
    $e_i'$ the same at the exchange before, the dissimilarity $\zeta^2$, the noise $\sigma^2$ and the squared norm of
    the mean gradient are

    $$\zeta^2 \approx \tfrac1n\sum_i\langle e_i, e_i'\rangle, \qquad
      \sigma^2 \approx \tfrac{1}{n-1}\sum_i\big(\tfrac12|e_i|^2 + \tfrac12|e_i'|^2 - \langle e_i, e_i'\rangle\big),
      \qquad |\nabla F|^2 \approx |\bar g|^2 - \tfrac1n\sigma^2,$$

    where the estimates are unbiased if the expected gradient $\nabla F_i$ of each worker hardly changes between the two
    exchanges. $\sigma^2$ is the noise of one worker's gradient at one step; the mean over $K$ steps has $1/K$ of it.
    The error $\epsilon$ of an unbiased codec in the mean counts as noise: the estimate of $\zeta^2$ stays unbiased,
    those of $\sigma^2$ and $|\nabla F|^2$ are $\tfrac{n}{n-1} E|\epsilon|^2$ and $\tfrac{n-2}{n-1} E|\epsilon|^2$ too
    large. Codecs whose error may exceed the gradient are refused, as is error feedback, whose mean contains parts of
    other exchanges.

    Exponential moving averages of the three figures are written to `Replica.metrics` as `gradient_dissimilarity`,
    `gradient_noise` and `gradient_square`; `recommend` reads them. The base's results are unchanged, bit for bit.
    Traffic: the base's, and per measurement an all-reduce of three numbers of 8 bytes; if the base sends gradients,
    also a check that all ranks are at the same step. State: `deviation` and `earlier`, and for averages of parameters
    `anchor`, each like the parameters, and a few numbers.

    Args:
        base: the strategy whose exchanges are measured.
        every: exchanges from one measurement to the next; more costs less.
        keep: the decay of the moving averages at each measurement, in [0, 1); more is smoother and slower.

    Example:
        Two workers whose gradients are 0 and 1, without noise:

        >>> import torch
        >>> import thinwire
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     probe = thinwire.Probe(thinwire.LocalSGD(period=1), every=2)
        ...     worker = thinwire.attach(model, optimizer, probe, comm=comm)
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return [round(figure, 3) for figure in worker.metrics().values()]
        >>> thinwire.run_threads(2, train)[0]
        [0.25, 0.0, 0.25]
    """

    base: Strategy = AllReduce()
    every: Annotated[int, Range("2..", "A measurement takes two successive exchanges. 20 is usual")] = 20
    keep: Annotated[float, Range("[0, 1)", "0.9 is a mean over about ten measurements")] = 0.9

    waits = "as its base; at each measurement all workers also wait for an all-reduce of three numbers"
    limits = (
        "if the base averages parameters, the optimizer must be plain SGD; with a GradScaler only the ratios of the "
        "estimates are meaningful"
    )

    def make_traits(self) -> Traits:
        """See `Traits`."""
        found = super().make_traits()
        return replace(
            found,
            # An average within nodes would look like a step of this worker.
            rounds=replace(found.rounds, local=False),
            growing=("lr_sum",),
            # The figures of one block would be reported as the model's.
            needs_whole="its figures are sums over the whole gradient. Measure the undivided model for some steps",
        )

    def __post_init__(self) -> None:
        if any(each.traits.rounds.weight for each in nested(self.base)):
            raise ConfigError(f"base={self.base}: the probe measures plain means. Use LocalSGD without weights")
        if self.base.traits.sends_gradients and self.base.traits.reads_gradient:
            raise ConfigError(
                f"base={self.base}: does not average plain gradients at every step. Measure AllReduce() for some steps "
                "instead"
            )
        averages = self.base.traits.rounds.local and not isinstance(self.base, Wrapper)
        if isinstance(self.base, Probe) or not (self.base.traits.sends_gradients or averages):
            raise ConfigError(
                f"base={self.base}: neither sends gradients nor ends rounds with a plain mean. Put the probe inside, "
                "as in SlowMo(base=Probe(base=Local())), or measure AllReduce() or LocalSGD() for some steps"
            )
        self._check_codec()

    def _check_codec(self) -> None:
        """Check that the codec's mean is that of this exchange's gradients, with a bounded error."""
        exchanging = self.base
        while isinstance(exchanging, Wrapper):
            exchanging = exchanging.base
        codec = next(codecs_of(exchanging), None)
        if codec is None or not (codec.traits.keeps_residual or codec.traits.error_bound >= 1):
            return
        found = (
            "its means contain parts of earlier gradients, and lack parts of this one"
            if codec.traits.keeps_residual
            else "its error may exceed the gradient, and would count as noise"
        )
        raise ConfigError(
            f"base={self.base}: figures compare each gradient with the mean of this exchange. With codec={codec} "
            f"{found}. Measure AllReduce() for some steps instead"
        )

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check; if the base averages parameters, the optimizer must be SGD without momentum."""
        super().check(size, optimizer)
        plain = isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)
        if optimizer is not None and not self.traits.sends_gradients and not plain:
            raise ConfigError(
                f"{type(optimizer).__name__} under {self}: gradients are computed from displacements, which needs SGD "
                "without momentum. Measure AllReduce() for some steps instead"
            )

    def start(self, r: Replica) -> None:
        """Start the base; allocate two deviations and, if it averages parameters, the start of a round."""
        super().start(r)
        r.zeros_state("deviation")
        r.zeros_state("earlier")
        if not self.traits.sends_gradients:
            r.zeros_state("anchor")
        r.state["means"] = torch.zeros(4, dtype=torch.float64, device=r.x.device)
        r.state["square"] = torch.zeros((), dtype=torch.float64, device=r.x.device)
        r.state["half"] = torch.zeros((), dtype=torch.bool, device="cpu")
        if not self.traits.sends_gradients:
            r.state["rounds"] = torch.zeros((), dtype=torch.int64, device="cpu")
            self._begin_round(r)

    # There are two cases. If the base sends gradients, `on_gradient` computes the deviation of each part when its mean
    # arrives; in `after_step` all parts are complete. If it averages parameters, `before_step` and `after_step` record
    # the start and the learning rates of a round, and `_end_round` computes the deviation.

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Run the base's hook; at a measured exchange, keep this worker's deviation from the mean."""
        # If some workers have run out of data, the means of the two exchanges are over different workers.
        if self._stage(r.step) == 0 or r.active < r.comm.size:
            return super().on_gradient(r, part)
        # The mean replaces the gradient in memory, so this worker's own is copied first.
        deviation, square = r.state["deviation"][part], r.state["square"]
        deviation.copy_(r.g[part])
        work = super().on_gradient(r, part)
        if work is None:
            raise ConfigError(f"base={self.base}: sends nothing during the backward pass. Measure AllReduce()")

        def subtract(mean: Tensor) -> Tensor:
            # Parts arrive from the end of the vector to its start, so this is the first one of a step.
            if part.stop == r.x.numel():
                square.zero_()
            square.add_(r.g[part].square().sum(dtype=torch.float64))
            deviation.sub_(r.g[part])
            return mean

        return work.then(subtract)

    def before_step(self, r: Replica) -> None:
        """Run the base's hook; if it averages parameters, save the start of a round."""
        if not self.traits.sends_gradients and not r.state["steps"]:
            r.state["anchor"].copy_(r.x)
        super().before_step(r)

    def after_step(self, r: Replica) -> None:
        """Run the base's hook; use the deviation of this exchange, or count this step towards the round."""
        if self.traits.sends_gradients:
            if r.comm.size > 1 and r.active == r.comm.size:
                self._measure(r, self._stage(r.step - 1))
            super().after_step(r)
            return
        r.state["lr_sum"] = r.state["lr_sum"] + r.lr
        r.state["steps"] += 1
        if self.base.traits.averages_at(r.step):
            self._end_round(r, super().after_step)
        else:
            super().after_step(r)

    def restart(self, r: Replica) -> None:
        """Restart the base; if it averages parameters, the interrupted round is not measured."""
        super().restart(r)
        if not self.traits.sends_gradients:
            self._begin_round(r)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the base's average; if it averages parameters, an outer step ends the current round."""
        average = super().average
        if at != "outer" or self.traits.sends_gradients or not r.state["steps"]:
            return average(r, at)
        self._end_round(r, lambda r: r.x.copy_(average(r, at)))
        return r.x

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute the base's state and the estimates; an incomplete measurement is dropped."""
        found = super().resized(states, size)
        kept = ("means", "rounds")
        return found and [{n: x for n, x in state.items() if n in kept or n.startswith("base/")} for state in found]

    def _begin_round(self, r: Replica) -> None:
        r.state["lr_sum"] = torch.zeros((), dtype=torch.float64, device="cpu")
        r.state["steps"] = torch.zeros((), dtype=torch.int64, device="cpu")

    def _end_round(self, r: Replica, average_: Callable[[Replica], object]) -> None:
        """Run the base's average, and keep the deviation of this worker's mean gradient."""
        stage = self._stage(int(r.state["rounds"]))
        if stage == 0 or r.comm.size == 1:
            average_(r)
        else:
            deviation, lr = r.state["deviation"].copy_(r.x), r.state["lr_sum"]
            average_(r)
            per_lr = torch.where(lr > 0, 1 / lr, 0.0)
            # Steps go against the gradient, which explains the sign.
            deviation.sub_(r.x).mul_(-per_lr)
            r.state["square"] = r.state["anchor"].sub_(r.x).mul_(per_lr).square().sum(dtype=torch.float64)
            self._measure(r, stage)
        r.state["rounds"] += 1
        self._begin_round(r)

    def _stage(self, exchanges: int) -> int:
        """Return 1 or 2 for the first or second exchange of a measurement, otherwise 0."""
        return max(0, exchanges % self.every - (self.every - 3))

    def _measure(self, r: Replica, stage: int) -> None:
        """Keep the first deviation of a measurement; at the second, estimate from both."""
        if stage == 0:
            return
        now, earlier = r.state["deviation"], r.state["earlier"]
        # If the first exchange was skipped, because workers had no data, the second one is not used either.
        complete = stage == 2 and bool(r.state["half"])
        r.state["half"].fill_(stage == 1)
        if stage == 1:
            earlier.copy_(now)
        if not complete:
            return
        if self.traits.sends_gradients:
            # Gloo aborts if these sums meet a gradient of a rank at another step.
            r.comm.check_in_step("a measurement").wait()
        pairs = ((now, now), (earlier, earlier), (now, earlier))
        sums = r.comm.all_reduce_(torch.stack([(x * y).sum(dtype=torch.float64) for x, y in pairs])).wait()
        steps = r.state.get("steps", torch.ones((), dtype=torch.float32, device="cpu"))
        found = estimate(sums, r.state["square"], r.comm.size, float(steps))
        # Moving averages that start at zero. The first element is the sum of their weights; dividing by it corrects the
        # bias, as Adam does.
        means = r.state["means"].mul_(self.keep)
        means.add_(torch.cat([torch.ones_like(found[:1]), found]))
        for name, mean in zip(NAMES, means[1:] / means[0], strict=True):
            r.metrics[name] = mean
