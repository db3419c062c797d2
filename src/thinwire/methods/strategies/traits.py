# SPDX-License-Identifier: Apache-2.0
"""What a strategy tells the rest of the package about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.methods.topology.base import Topology

_OWN_PACE = "its workers go at their own pace, and their messages belong to fixed ranks; use AllReduce() or SlowMo()"


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """When all workers continue from one average of their parameters, and what a round consists of.

    Attributes:
        ends: rounds end after multiples of each of these numbers of steps. Empty where the steps cannot be known in
            advance, or where workers never continue from one average.
        warmup: the first steps, each of which ends a round, if any step does.
        local: a round consists of local steps alone, and ends with a mean of all workers' parameters. Something else
            may move the parameters in between, as a local step does.
        weight: the name in `r.state` of this worker's weight in averages, a number; empty where all weigh the same.
        estimates: each worker's own parameters are its estimate of the average, as `SlowMo(exact=False)` takes them to
            be. They are not where a part of the average is in flight or in the state, nor where the state refers to a
            point that all workers share. Always true of `Traits.equal_replicas`.
        fragments: the parts of the vector that are averaged at different steps of a period.
        delay: the steps between the start of a mean and its use. It counts only where parameters are used late.
        optimizer_state: what happens to the optimizer's state when a round ends: it is left alone, cleared, or averaged
            over workers.
        postpones: a mean of parameters may be left out, and its round continues to the next one, where
            `Replica.postponed` asks for it, as `Budget` does.

    Example:
        >>> import thinwire
        >>> rounds = thinwire.DiLoCo(period=8, delay=2).traits.rounds
        >>> rounds.delay, rounds.fragments
        (2, 1)
    """

    ends: tuple[int, ...] = ()
    warmup: int = 0
    local: bool = False
    weight: str = ""
    estimates: bool = False
    fragments: int = 1
    delay: int = 0
    optimizer_state: Literal["maintain", "reset", "average"] = "maintain"
    postpones: bool = False


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What other packages need to know about a strategy, which they read as `strategy.traits`.

    They ask for nothing else: neither for the class of a strategy nor for its hyperparameters. The defaults describe
    a strategy that only averages parameters in its hooks.

    Attributes:
        period: it communicates only after steps that are multiples of `period`; None where there is no such number.
        steady_from: the step from which on its traffic repeats, after a warm-up; `explain` describes that traffic.
        topology: the graph whose neighbors exchange messages; None where all workers exchange with all.
        sends_gradients: gradients are sent during the backward pass, through `on_gradient`. Without a period, it leaves
            the parameters to the optimizer.
        reads_gradient: `before_step` needs `r.g`, and may change it. If it also sends gradients or keeps replicas
            equal, all workers skip a step in which the gradient of any of them is NaN or infinite.
        equal_replicas: the parameters are equal on all ranks, bit for bit, after every step. The engine compares them
            now and then. Averages and the consensus then need no message, and all ranks must start equal.
        needs_equal_start: nothing makes parameters equal that started unequal, so `attach(init="own")` refuses workers
            whose parameters differ. Always true with `equal_replicas`.
        rounds: when all workers continue from one average; see `averages_at`.
        skips_steps: a worker that is late skips steps, and continues at the step where the others are. With a `period`,
            workers are at the same step only after its multiples.
        timing_dependent: results depend on which message arrives first, so two runs differ.
        data_dependent_bytes: the number of bytes that are sent depends on the numbers that are sent.
        elementwise: every element of the vectors is treated by itself, so one vector may hold several models.
        on_resize: what becomes of the state when the number of workers changes. "keep": state that is equal on all
            workers stays, and the rest is averaged (`Strategy.resized`). "restart": as "keep"; but it keeps a mean to
            which each worker adds how far it has come since its last message, in which a lost worker would stay, so
            that all restart at their average. "start": it starts from scratch at the average, because its state and
            messages in flight belong to single workers or to the graph between them.
        feeds_back: it adds what its codec leaves out of a message to the next one, so a biased codec needs no
            `ErrorFeedback`.
        growing: the names (or their beginnings) in `r.state` and `r.inflight` of tensors whose size or dtype changes
            during training. A checkpoint's other tensors must have the sizes that `start` makes.
        inelastic: why its workers cannot go on when one of them is lost, as `attach(elastic=True)` promises; empty
            where they can. None refuses it where `timing_dependent` or `skips_steps` is true.
        needs_whole: why it needs the norm or the whole gradient of the model, and what to use instead; empty where any
            part of the vector will do: a block of tensor parallelism, or a fragment of `Streaming`.
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
    topology: Topology | None = None
    sends_gradients: bool = False
    reads_gradient: bool = False
    equal_replicas: bool = False
    needs_equal_start: bool = False
    rounds: Rounds = Rounds()
    skips_steps: bool = False
    timing_dependent: bool = False
    data_dependent_bytes: bool = False
    elementwise: bool = False
    on_resize: Literal["keep", "restart", "start"] = "keep"
    feeds_back: bool = False
    growing: tuple[str, ...] = ()
    inelastic: str | None = None
    needs_whole: str = ""
    lr_factor: float | None = 1.0

    def __post_init__(self) -> None:
        """Replicas that stay equal must start equal."""
        if self.equal_replicas:
            object.__setattr__(self, "needs_equal_start", True)

    def averages_at(self, step: int) -> bool:
        """Whether all workers continue from one average of their parameters after that many steps.

        Example:
            >>> import thinwire
            >>> [step for step in range(10) if thinwire.LocalSGD(period=4, warmup_steps=2).traits.averages_at(step)]
            [1, 2, 4, 8]
        """
        ends, warmup = self.rounds.ends, self.rounds.warmup
        return step > 0 and bool(ends) and (step <= warmup or any(step % each == 0 for each in ends))

    @property
    def moves_parameters(self) -> bool:
        """Whether a hook beside the optimizer's step may change `r.x` and leave the optimizer's state unchanged.

        An optimizer that computes the parameters from that state would undo such a change.
        """
        alone = self.sends_gradients or self.equal_replicas or self.rounds.local
        return self.period is not None or not alone

    @property
    def skips_nonfinite(self) -> bool:
        """Whether all workers skip a step in which the gradient of any of them is not finite, in `before_step`."""
        return self.reads_gradient and (self.sends_gradients or self.equal_replicas)

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
