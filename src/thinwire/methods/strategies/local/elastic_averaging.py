# SPDX-License-Identifier: Apache-2.0
"""Pull every worker and a common centre towards each other."""

from math import inf
from typing import Annotated

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.displacement import Momentum, refuse_momentum
from thinwire.core.replica.replica import Replica
from thinwire.core.validation import Range
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.strategies.base import At, Strategy, Traits
from thinwire.methods.strategies.local.coded_means import (
    check_tracked,
    common_point,
    restart_mean,
    tracked_mean,
    tracks,
)
from thinwire.registry import registered


@registered
class EASGD(Strategy):
    r"""Elastic averaging SGD: every `period` steps, workers and their centre move a part of the way to each other.

    With $c$ the centre, of which every worker has an equal copy, and both updates computed from the old values,

    $$x_i \leftarrow x_i - \gamma\, g_i(x_i) - \alpha (x_i - c), \qquad
      c \leftarrow (1-\beta) c + \tfrac{\beta}{n} \sum_i x_i ,$$

    and plain steps in between. The centre starts as the workers' mean. With `momentum` $\delta$ it is EAMSGD: workers
    compute gradients at a point ahead of their position, $x_i + \delta v_i$,

    $$v_i \leftarrow \delta v_i - \gamma\, g_i(x_i + \delta v_i), \qquad x_i \leftarrow x_i + v_i .$$

    Workers are pulled to the centre's old value, so the mean of the workers is only needed at the next exchange and is
    in flight until then; results do not depend on when it arrives. There is no server: the centre moves by the mean of
    all workers, the synchronous form of the paper.

    With an unbiased `codec` $C$ the mean of all workers is $c + \tfrac1n \sum_j C(x_j - c)$. With `ErrorFeedback`
    workers send their changes since the last message, and with $x_j'$ the worker at that time the mean is
    $m \leftarrow m + \tfrac1n \sum_j C(x_j - x_j')$.

    While gradients are similar, workers and centre move with $\frac{\beta}{\alpha+\beta} \cdot \frac{1}{1-\delta}$
    times the learning rate.

    Traffic: $2\frac{n-1}{n}$ of the parameters, or of their payload, per worker and period, hidden behind the period.
    State: `centre` and, with momentum, `position` ($x_i$), each like the parameters. With a codec the centre is in
    fp32, and the codec's state is added; with `ErrorFeedback` also `mean` ($m$), like the centre, and `sent` ($x_i'$)
    unless it is part of the residual `error`.

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

    period: Annotated[int, Range("1..", "10 is usual")] = 10
    centre_pull: Annotated[
        float, Range("(0, 1]", "With more the centre would overshoot the workers' mean. 0.9 is usual")
    ] = 0.9
    pull: Annotated[float | None, Range("[0, 1]", "None is centre_pull over the number of workers")] = None
    momentum: Momentum = 0.0
    codec: Codec | None = None

    paper = "Zhang et al., Deep Learning with Elastic Averaging SGD, NeurIPS 2015, arXiv:1412.6651"
    waits = (
        "every `period` steps all workers wait for the rest of the all-reduce that was launched `period` steps before"
    )
    limits = "workers in different basins keep each other, and the centre, away from either minimum"

    def make_traits(self) -> Traits:
        """See `Traits`."""
        return Traits(
            period=self.period, on_resize="restart" if tracks(self.codec) else "keep", lr_factor=self._lr_factor()
        )

    def pull_for(self, size: int) -> float:
        r"""$\alpha$ for a number of workers."""
        return self.centre_pull / size if self.pull is None else self.pull

    def _lr_factor(self) -> float | None:
        """Return the factor in steady state, in which the centre is as fast as the workers."""
        if self.pull is None:  # it depends on the number of workers
            return None
        return self.centre_pull / (self.pull + self.centre_pull) / (1 - self.momentum)

    def largest_step(self, size: int) -> float:
        r"""Return the largest learning rate, times the curvature, at which workers and centre converge on a quadratic.

        This holds for `period=1` without momentum; without a pull it is 2. The workers' mean and the centre, and the
        differences between workers, must both converge: $\gamma h < \min\left(2 - \frac{2\alpha}{2-\beta},\;
        1 - \alpha + \frac{1-\alpha\beta}{1-\beta},\; 2 - \alpha\right)$.
        """
        alpha, beta = self.pull_for(size), self.centre_pull
        overshoot = inf if beta == 1 else 1 - alpha + (1 - alpha * beta) / (1 - beta)
        return min(2 - 2 * alpha / (2 - beta), overshoot, 2 - alpha)

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the pulls are stable, the codec can compress differences, and momentum is applied once."""
        check_tracked(self.codec)
        if self.largest_step(size) <= 0:
            raise ConfigError(
                f"pull={self.pull}, centre_pull={self.centre_pull}: workers and centre would oscillate forever. "
                "Their sum must be below 2"
            )
        if optimizer is not None and self.momentum:
            refuse_momentum(optimizer, self, f"EASGD(period={self.period}, momentum=0)")

    def start(self, r: Replica) -> None:
        """Allocate the centre, the workers' mean."""
        r.state["centre"] = common_point(r, self.codec)
        if self.momentum:
            r.state["position"] = r.x.clone()

    def before_step(self, r: Replica) -> None:
        """At the start of a period, launch the mean of the workers, and compute this worker's pull."""
        if since := r.step % self.period:
            if since == (self.period + 1) // 2:
                r.advance("mean")
            return
        self._move_centre_(r)
        x, centre = r.state.get("position", r.x), r.state["centre"]
        # The centre's new value is only needed at the next period, so the mean may be in flight until then.
        r.launch("mean", tracked_mean(r, x, centre, self.codec).then(lambda mean: [mean]))
        # The worker is pulled after the optimizer's step: its weight decay, like the gradient, belongs to the
        # parameters before the pull.
        r.state["gap"] = (x - centre).mul_(self.pull_for(r.comm.size))

    def _move_centre_(self, r: Replica) -> None:
        if (mean := r.collect("mean")) is not None:
            r.state["centre"].lerp_(mean[0], self.centre_pull)

    def after_step(self, r: Replica) -> None:
        """Pull the worker; with momentum, move to the point where the next gradient is computed."""
        if (gap := r.state.pop("gap", None)) is not None:
            r.x.sub_(gap)
            if self.momentum:
                r.state["position"].sub_(gap)
        if not self.momentum:
            return
        # `r.x` is the point ahead, at which gradients are computed; `position` is the worker's own.
        position = r.state["position"]
        velocity = r.x - position
        position.copy_(r.x)
        r.x.add_(velocity, alpha=self.momentum)

    def restart(self, r: Replica) -> None:
        """Set the centre and all workers to the parameters, with zero velocities."""
        r.collect("mean")
        # A velocity is the distance from a worker to the point ahead of it, and both are now equal to the parameters.
        for name in r.state.keys() & {"centre", "position"}:
            r.state[name].copy_(r.x)
        restart_mean(r, self.codec)

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the centre, with the mean in flight; if workers continue from the average, the mean of workers."""
        if at != "now":
            # An outer step starts from the workers, and velocities become zero. Otherwise centre, velocities and
            # residuals are kept.
            x = r.state.get("position", r.x) if at == "outer" else r.x
            return mean_(r.comm, x.clone()).wait()
        centre, mean = r.state["centre"], r.inflight.get("mean")
        if mean is not None:
            centre = centre.lerp(mean.wait()[0], self.centre_pull)
        return centre.to(r.x.dtype, copy=True)
