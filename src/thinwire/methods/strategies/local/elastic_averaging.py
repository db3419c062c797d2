# SPDX-License-Identifier: Apache-2.0
"""Pull every worker and a common centre towards each other."""

from functools import cached_property
from math import inf

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.displacement import check_momentum, refuse_momentum
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy
from thinwire.methods.strategies.local.coded_means import (
    check_tracked,
    common_point,
    restart_mean,
    tracked_mean,
    tracks,
)
from thinwire.methods.strategies.traits import Traits
from thinwire.registry import registered


@registered
class EASGD(Strategy):
    r"""Elastic averaging SGD: every `period` steps, workers and their centre move a part of the way to each other.

    With $c$ the centre, of which every worker holds an equal copy, and both updates from the values before either,

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i) - \alpha (x_i - c), \qquad
      c \leftarrow (1-\beta) c + \tfrac{\beta}{n} \sum_i x_i ,$$

    and plain steps in between. The centre starts as the workers' mean. With `momentum` $\delta$ it is EAMSGD: workers
    compute gradients at a point ahead of their position, $x_i + \delta v_i$,

    $$v_i \leftarrow \delta v_i - \gamma\, g_i(x_i + \delta v_i), \qquad x_i \leftarrow x_i + v_i .$$

    A worker is pulled to the centre as it was, so that it has not to wait for the centre's next value: workers' mean
    travels until the next exchange needs it, and results are as if it had been there at once.
    There is no server: the centre moves by the mean of all workers, which is the paper's synchronous form.

    With an unbiased `codec` $C$ the mean of all workers is $c + \tfrac1n \sum_j C(x_j - c)$. With `ErrorFeedback` it is
    $m$, and workers send how far they have come since their last message: with $x_i'$ the worker then,
    $m \leftarrow m + \tfrac1n \sum_j C(x_j - x_j')$.

    While gradients stay alike, workers and centre move as with $\frac{\beta}{\alpha+\beta} \cdot \frac{1}{1-\delta}$
    times the learning rate.

    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and period, hidden behind the period.
    State: `centre` and, with momentum, `position` ($x_i$), each like the parameters; with a codec the centre is in
    fp32, and the codec's state is added; with `ErrorFeedback` also `mean` ($m$), like the centre. What it keeps of
    $x_i'$ is in the residual `error`, or in `sent`.

    Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015, arXiv:1412.6651, Section 3 and
    Algorithms 1 and 2.

    Args:
        period: $\tau$, optimizer steps between exchanges; more sends less.
        centre_pull: $\beta$, in (0, 1]; more lets the centre follow the workers faster.
        pull: $\alpha$, in [0, 1]; more keeps workers closer to the centre; None is $\beta/n$, as in the paper.
        momentum: $\delta$ of the workers, in [0, 1), for an optimizer without one; more smooths and speeds up.
        codec: compresses the differences; None sends them uncompressed.

    Example:
        The largest stable product of learning rate and curvature falls as the pull grows:

        >>> import thinwire
        >>> [round(thinwire.EASGD(pull=pull).largest_step(size=4), 2) for pull in (0.0, 0.2, 0.8)]
        [2.0, 1.64, 0.55]
    """

    period: int = 10
    centre_pull: float = 0.9
    pull: float | None = None
    momentum: float = 0.0
    codec: Codec | None = None

    paper = "Zhang et al., Deep Learning with Elastic Averaging SGD, NeurIPS 2015, arXiv:1412.6651"
    waits = (
        "every `period` steps all workers wait for the rest of the all-reduce that was launched `period` steps before"
    )
    limits = "workers in different basins keep each other, and the centre, away from either minimum"

    @cached_property
    def traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period, on_resize="restart" if tracks(self.codec) else "keep", lr_factor=self._lr_factor()
        )

    def __post_init__(self) -> None:
        """Check the types and the ranges."""
        if self.period < 1:
            raise ConfigError(f"period={self.period}: must be at least 1 step; 10 is usual")
        if not 0 < self.centre_pull <= 1:
            raise ConfigError(
                f"centre_pull={self.centre_pull}: must lie in (0, 1], or the centre would overshoot the workers' mean; "
                "0.9 is usual"
            )
        if self.pull is not None and not 0 <= self.pull <= 1:
            raise ConfigError(f"pull={self.pull}: must lie in [0, 1]; None is centre_pull over the number of workers")
        check_momentum(self.momentum)

    def pull_for(self, size: int) -> float:
        r"""$\alpha$ for a number of workers."""
        return self.centre_pull / size if self.pull is None else self.pull

    def _lr_factor(self) -> float | None:
        """In steady state, where the centre moves as fast as the workers; None without a `pull`."""
        if self.pull is None:  # then it depends on the number of workers
            return None
        return self.centre_pull / (self.pull + self.centre_pull) / (1 - self.momentum)

    def largest_step(self, size: int) -> float:
        r"""The largest learning rate, times the curvature, at which workers and centre converge on a quadratic.

        For `period=1` without momentum; 2 where there is no pull. Both the workers' mean with the centre and their
        differences must shrink: $\gamma h < \min\left(2 - \frac{2\alpha}{2-\beta},\;
        1 - \alpha + \frac{1-\alpha\beta}{1-\beta},\; 2 - \alpha\right)$.
        """
        alpha, beta = self.pull_for(size), self.centre_pull
        overshoot = inf if beta == 1 else 1 - alpha + (1 - alpha * beta) / (1 - beta)
        return min(2 - 2 * alpha / (2 - beta), overshoot, 2 - alpha)

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse unstable pulls, codecs that differences cannot be compressed with, and a second momentum."""
        check_tracked(self.codec)
        if self.largest_step(size) <= 0:
            raise ConfigError(
                f"pull={self.pull}, centre_pull={self.centre_pull}: workers and centre would oscillate forever; "
                "their sum must be below 2"
            )
        if optimizer is not None and self.momentum:
            refuse_momentum(optimizer, self, f"EASGD(period={self.period}, momentum=0)")

    def start(self, r: Replica) -> None:
        """Allocate the centre, the workers' mean."""
        r.state["centre"] = common_point(r, self.codec)
        if self.momentum:
            r.state["position"] = r.x.clone()

    def before_step(self, r: Replica) -> None:
        """At the start of a period send the worker, and compute its pull; both belong to the values before either."""
        if since := r.step % self.period:
            if since == (self.period + 1) // 2:
                r.advance("mean")
            return
        self._move_centre_(r)
        x, centre = r.state.get("position", r.x), r.state["centre"]
        # Nothing needs the centre's new value before the next period, so the mean travels until then.
        r.launch("mean", tracked_mean(r, x, centre, self.codec).then(lambda mean: [mean]))
        # The worker is pulled after the optimizer's step: its weight decay, like the gradient, belongs to the
        # parameters before the pull.
        r.state["gap"] = (x - centre).mul_(self.pull_for(r.comm.size))

    def _move_centre_(self, r: Replica) -> None:
        if (mean := r.collect("mean")) is not None:
            r.state["centre"].lerp_(mean[0], self.centre_pull)

    def after_step(self, r: Replica) -> None:
        """Pull the worker; with momentum, move on to the point where the next gradient is computed."""
        if (gap := r.state.pop("gap", None)) is not None:
            r.x.sub_(gap)
            if self.momentum:
                r.state["position"].sub_(gap)
        if not self.momentum:
            return
        # `r.x` is the point ahead, where gradients are computed; `position` is where the worker is.
        position = r.state["position"]
        velocity = r.x - position
        position.copy_(r.x)
        r.x.add_(velocity, alpha=self.momentum)

    def restart(self, r: Replica) -> None:
        """The centre and all workers are where the parameters are; velocities become zero."""
        r.collect("mean")
        # A velocity is the distance from a worker to the point ahead of it, where the parameters are, and both are now
        # this one point.
        for name in r.state.keys() & {"centre", "position"}:
            r.state[name].copy_(r.x)
        restart_mean(r, self.codec)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """The centre, with the mean that is in flight; where workers continue from it, their mean."""
        if at != "now":
            # An outer step starts from the workers, and all velocities become zero. Elsewhere the centre stays where it
            # is, as do velocities and residuals on average.
            x = r.state.get("position", r.x) if at == "outer" else r.x
            return mean_(r.comm, x.clone()).wait()
        centre, mean = r.state["centre"], r.inflight.get("mean")
        if mean is not None:
            centre = centre.lerp(mean.wait()[0], self.centre_pull)
        return centre.to(r.x.dtype, copy=True)
