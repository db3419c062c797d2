# SPDX-License-Identifier: Apache-2.0
"""What a strategy tells the rest of the package about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.methods.topology.base import Topology

_OWN_PACE = "its workers go at their own pace, and their messages belong to fixed ranks; use AllReduce() or SlowMo()"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What other packages need to know about a strategy, which they read as `strategy.traits`.

    They ask for nothing else: neither for the class of a strategy nor for its hyperparameters. The defaults describe
    a strategy that only averages parameters in its hooks.

    Attributes:
        period: it communicates only after steps that are multiples of `period`; None where there is no such number.
        steady_from: the step from which on its traffic repeats, after a warm-up; `explain` describes that traffic.
        fragments: the parts of the vector that are averaged at different steps of a period.
        delay: the steps between the start of a mean and its use. It counts only where parameters are used late.
        topology: the graph whose neighbors exchange messages; None where all workers exchange with all.
        sends_gradients: gradients are sent during the backward pass, through `on_gradient`.
        reads_gradient: `before_step` needs `r.g`, and may change it.
        moves_parameters: a hook before or after the optimizer's step may change `r.x` and leave the optimizer's state
            as it is. An optimizer that computes the parameters from that state would undo such a change.
        optimizer_state: what happens to the optimizer's state when a period ends: it is left alone, cleared, or
            averaged over workers.
        equal_replicas: the parameters are equal on all ranks, bit for bit, after every step. The engine compares them
            now and then. Averages and the consensus then need no message, and all ranks must start equal.
        needs_equal_start: nothing makes parameters equal that started unequal, so `attach(init="own")` refuses workers
            whose parameters differ. Always true with `equal_replicas`.
        sample_weighted: means are weighted by the samples that each worker has used.
        local_rounds: rounds consist of local steps alone, and each ends with a mean of all workers' parameters.
            Something else may move the parameters in between, as a local step does.
        postpones: a mean of parameters may be left out, and its round goes on to the next one, where
            `Replica.postponed` asks for it, as `Budget` does.
        skips_steps: a worker that is late skips steps, and continues at the step where the others are. With a `period`,
            workers are at the same step only after its multiples.
        skips_nonfinite: where gradients are exchanged in `before_step`, all workers skip a step in which the gradient
            of any of them is NaN or infinite.
        timing_dependent: results depend on which message arrives first, so two runs differ.
        data_dependent_bytes: the number of bytes that are sent depends on the numbers that are sent.
        elementwise: every element of the vectors is treated by itself, so one vector may hold several models.
        restarts_on_resize: with another number of workers it starts again at `resume_point`, because its state and its
            messages in flight belong to single workers or to the graph between them.
        tracks_mean: it keeps a mean over workers, to which each of them adds how far it has come since its last
            message. A worker that is lost would stay in this mean.
        feeds_back: it adds what its codec leaves out of a message to the next one, so a biased codec needs no
            `ErrorFeedback`.
        growing: the names (or their beginnings) in `r.state` and `r.inflight` of tensors whose size or dtype changes
            during training. A checkpoint's other tensors must have the sizes that `start` makes.
        inelastic: why its workers cannot go on when one of them is lost, as `attach(elastic=True)` promises; empty
            where they can. None refuses it where `timing_dependent` or `skips_steps` is true.
        lr_factor: the effective learning rate in the long run, while gradients stay alike, as a multiple of the
            optimizer's. A momentum of the strategy's own makes it larger, a pull to an older mean smaller. None where
            it is not known, or differs between workers, gradients or times.

    Example:
        >>> import thinwire
        >>> thinwire.AllReduce().traits.equal_replicas, thinwire.LocalSGD(period=8).traits.period
        (True, 8)

        A strategy declares what differs from the defaults:

        >>> from dataclasses import dataclass
        >>> from functools import cached_property
        >>> @dataclass(frozen=True)
        ... class Halving(thinwire.Strategy):
        ...     @cached_property
        ...     def traits(self):
        ...         return thinwire.Traits(reads_gradient=True)
        ...     def before_step(self, r):
        ...         r.g.mul_(0.5)
        >>> Halving().traits.reads_gradient
        True
    """

    period: int | None = None
    steady_from: int = 0
    fragments: int = 1
    delay: int = 0
    topology: Topology | None = None
    sends_gradients: bool = False
    reads_gradient: bool = False
    moves_parameters: bool = True
    optimizer_state: Literal["maintain", "reset", "average"] = "maintain"
    equal_replicas: bool = False
    needs_equal_start: bool = False
    sample_weighted: bool = False
    local_rounds: bool = False
    postpones: bool = False
    skips_steps: bool = False
    skips_nonfinite: bool = False
    timing_dependent: bool = False
    data_dependent_bytes: bool = False
    elementwise: bool = False
    restarts_on_resize: bool = False
    tracks_mean: bool = False
    feeds_back: bool = False
    growing: tuple[str, ...] = ()
    inelastic: str | None = None
    lr_factor: float | None = 1.0

    def __post_init__(self) -> None:
        """Replicas that stay equal must start equal."""
        if self.equal_replicas:
            object.__setattr__(self, "needs_equal_start", True)

    @property
    def meets_every(self) -> int:
        """The number of steps after whose multiples all workers are at the same step."""
        return (self.period or 1) if self.skips_steps else 1

    @property
    def inelastic_reason(self) -> str:
        """Why its workers cannot go on when one of them is lost; empty where they can."""
        if self.inelastic is None:
            return _OWN_PACE if self.timing_dependent or self.skips_steps else ""
        return self.inelastic
