# SPDX-License-Identifier: Apache-2.0
"""The properties of a strategy that the rest of the package reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thinwire.methods.topology.base import Topology

_OWN_PACE = "its workers run at their own pace, and their messages belong to fixed ranks. Use AllReduce() or SlowMo()"


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The schedule of averages of the parameters, from which all workers continue.

    Attributes:
        ends: rounds end after multiples of each of these numbers of steps. Empty if the steps are not known in advance,
            or if workers never continue from one average.
        warmup: each of these first steps ends a round, if `ends` is not empty.
        local: a round consists of local steps only, and ends with a mean of all workers' parameters. A wrapper may also
            change the parameters during the round. With `fragments` this holds for each of them, at its own steps.
        weight: the name in `r.state` of this worker's weight in averages; empty if all weights are equal.
        estimates: each worker's own parameters are its estimate of the average, as `SlowMo(exact=False)` assumes. False
            if a part of the average is in flight or in the state, or if the state refers to a point that all workers
            share. Always true with `Traits.equal_replicas`.
        fragments: the number of parts of the vector that are averaged at different steps of a period.
        delay: the steps between the start of a mean of parameters and its use.
        guarded: a mean of parameters scales down or leaves out workers that have moved much further than usual.
        optimizer_state: the optimizer's state is kept, cleared, or averaged over workers when a round ends.
        postpones: the strategy skips a mean, and continues its round until the next one, if `Replica.postponed` is
            true, as under `Budget`.

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
    guarded: bool = False
    optimizer_state: Literal["maintain", "reset", "average"] = "maintain"
    postpones: bool = False


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a strategy that other packages read, as `strategy.traits`.

    They read neither its class nor its hyperparameters. The defaults describe a strategy that only averages parameters
    in its hooks.

    Attributes:
        period: the strategy communicates only after steps that are multiples of `period`; None if no such number
            exists.
        steady_from: the step at which its traffic starts to repeat, after a warm-up; `explain` describes that traffic.
        topology: the graph whose neighbors exchange messages; None if all workers exchange with all.
        sends_gradients: gradients are sent during the backward pass, through `on_gradient`. Without a `period`, only
            the optimizer changes the parameters.
        reads_gradient: `before_step` needs `r.g`, and may change it. If the strategy also sends gradients or keeps
            replicas equal, all workers skip a step in which the gradient of any of them is NaN or infinite.
        equal_replicas: the parameters are equal on all ranks, bit for bit, after every step. All ranks must start
            equal, and the engine compares them from time to time. Averages and the consensus need no message.
        needs_equal_start: parameters that start unequal stay unequal, so `attach(init="own")` refuses workers whose
            parameters differ. Always true with `equal_replicas`.
        rounds: when all workers continue from one average; see `averages_at`.
        skips_steps: a late worker skips steps, and continues at the others' step. With a `period`, workers are at the
            same step only after its multiples.
        timing_dependent: results depend on which message arrives first, so two runs differ.
        data_dependent_bytes: the number of bytes sent depends on the values sent.
        on_resize: how the state changes with the number of workers. "keep": state that is equal on all workers is kept,
            and the rest is averaged (`Strategy.resized`). "restart": as "keep", but all restart at their average,
            because the state has a mean to which each worker adds only its changes, and a lost worker would remain part
            of it. "start": state and messages in flight belong to single workers or to the graph between them, so the
            strategy starts from scratch at the average.
        feeds_back: the strategy itself adds the codec's error to the next message, so a biased codec needs no
            `ErrorFeedback`.
        growing: names or prefixes in `r.state` and `r.inflight` of tensors whose shape or dtype may change during
            training. All other tensors of a checkpoint must have the shapes that `start` allocates.
        inelastic: why workers cannot continue after one of them is lost, under `attach(elastic=True)`; empty if they
            can. With None they can unless `timing_dependent` or `skips_steps` is true.
        needs_whole: why the strategy needs the whole gradient of the model or its norm, and what to use instead; empty
            if it works on any part of the vector: a block of tensor parallelism, or a fragment of `Streaming`.
        reads_loss: decisions depend on the loss of `worker.record_batch`, which differs between ranks that hold shards
            of one model.
        lr_factor: the effective learning rate in steady state, while gradients are similar, as a multiple of the
            optimizer's. The strategy's own momentum increases it, a pull to an older mean decreases it. None if it is
            unknown, or differs between workers or gradients, or over time.

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
    on_resize: Literal["keep", "restart", "start"] = "keep"
    feeds_back: bool = False
    growing: tuple[str, ...] = ()
    inelastic: str | None = None
    needs_whole: str = ""
    reads_loss: bool = False
    lr_factor: float | None = 1.0

    def __post_init__(self) -> None:
        # Replicas that stay equal must start equal.
        if self.equal_replicas:
            object.__setattr__(self, "needs_equal_start", True)

    def averages_at(self, step: int) -> bool:
        """Return True if all workers continue from one average of their parameters after this step.

        Example:
            >>> import thinwire
            >>> [step for step in range(10) if thinwire.LocalSGD(period=4, warmup_steps=2).traits.averages_at(step)]
            [1, 2, 4, 8]
        """
        ends, warmup = self.rounds.ends, self.rounds.warmup
        return step > 0 and bool(ends) and (step <= warmup or any(step % each == 0 for each in ends))

    @property
    def moves_parameters(self) -> bool:
        """True if a hook may change `r.x`, besides the optimizer's step.

        An optimizer that computes the parameters from its own state would undo such a change.
        """
        alone = self.sends_gradients or self.equal_replicas or self.rounds.local
        return self.period is not None or not alone

    @property
    def skips_nonfinite(self) -> bool:
        """True if all workers skip a step in which the gradient of any of them is not finite, in `before_step`."""
        return self.reads_gradient and (self.sends_gradients or self.equal_replicas)

    @property
    def meets_every(self) -> int:
        """After multiples of this number of steps, all workers are at the same step."""
        return (self.period or 1) if self.skips_steps else 1

    @property
    def inelastic_reason(self) -> str:
        """Why workers cannot continue after one of them is lost; empty if they can."""
        if self.inelastic is None:
            return _OWN_PACE if self.timing_dependent or self.skips_steps else ""
        return self.inelastic
