# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies: hyperparameters, a few hooks around the optimizer's step, and traits."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.codecs.base import Codec
from thinwire.methods.codecs.feedback import resize_alike
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.reduce.leaving import hand_on_residuals
from thinwire.methods.topology.base import Topology
from thinwire.registry import Recipe

At = Literal["now", "resume", "end", "outer"]
"""The purpose of an average; see `Strategy.average`."""

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
        >>> @dataclass(frozen=True)
        ... class Halving(thinwire.Strategy):
        ...     def make_traits(self):
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


class Strategy(Recipe, ABC):
    """A frozen dataclass of hyperparameters that decides what workers send, and when.

    It holds no tensor: everything that changes is in the `Replica` that each hook gets. Its repr is the recipe. All
    hooks are optional; a strategy without hooks sends nothing. All ranks call the hooks in the same order.

    Attributes:
        paper: the source of the method.
        waits: which workers wait for each other, and when.
        limits: the method's assumptions, and when not to use it.
        traits: the properties that other packages read; see `Traits`. To change the defaults, override `make_traits`.

    Example:
        A strategy that averages the parameters after every second step:

        >>> from dataclasses import dataclass
        >>> import torch
        >>> import thinwire
        >>> @dataclass(frozen=True)
        ... class EverySecondStep(thinwire.Strategy):
        ...     def after_step(self, r):
        ...         if r.step % 2 == 0:
        ...             r.x.copy_(self.average(r))
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     torch.nn.init.zeros_(model.weight)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     thinwire.attach(model, optimizer, EverySecondStep(), comm=comm)
        ...     for _ in range(2):
        ...         model.weight.grad = torch.full_like(model.weight, comm.rank)
        ...         optimizer.step()
        ...     return model.weight.item()
        >>> thinwire.run_threads(2, train)
        [-1.0, -1.0]
    """

    paper: ClassVar[str] = ""
    waits: ClassVar[str] = "workers do not wait for each other"
    limits: ClassVar[str] = ""

    @cached_property
    def traits(self) -> Traits:
        """The result of `make_traits`."""
        return self.make_traits()

    def make_traits(self) -> Traits:
        """Return the traits; `traits` calls it once.

        The defaults describe a strategy that averages parameters in its hooks.
        """
        return Traits()

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Check that the recipe supports this number of workers and this optimizer, before anything is sent.

        Args:
            size: the number of workers.
            optimizer: each worker's optimizer; None if it is not known yet.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def start(self, r: Replica) -> None:
        """Allocate `r.state`; `r.x` holds the initial parameters, equal on all ranks if `r.equal_start`."""

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Start to send `r.g[part]`, which is final. The order of parts is fixed; the engine awaits the result."""

    def before_step(self, r: Replica) -> None:
        """Run before the optimizer changes `r.x`, once per step.

        `r.g` is complete only with the trait `reads_gradient`; otherwise the optimizer's closure may still compute it.
        The gradient and the optimizer's weight decay belong to the current `r.x`, so move the parameters in
        `after_step`.
        """

    def after_step(self, r: Replica) -> None:
        """Run after the optimizer has changed `r.x`; `r.step` includes this step."""

    def fragments_in(self, r: Replica) -> list[tuple[Replica, int]]:
        """Return the parts of the vector that have rounds of their own, in the order in which these end.

        Each comes with the step of a period, from 1, after which its round ends. Together they are the whole vector.
        """
        return [(r, self.traits.period or 1)]

    def ends_round(self, r: Replica) -> bool:
        """Return True if the step just taken ends this worker's round; asked before `after_step`."""
        return self.traits.averages_at(r.step)

    def restart(self, r: Replica) -> None:
        """Restart a round at `r.x`, which other code, such as the slow step of a wrapper, has just set.

        Drop messages in flight, and set state that refers to the old parameters, such as an anchor, to the new ones.
        Keep momenta and residuals. All ranks call it together, with equal parameters unless `Rounds.estimates`.
        """

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the average of all workers' parameters, equal on all ranks; all call it together.

        Args:
            r: the replica, which only "outer" may change.
            at: the purpose of the average.

                - "now": the model to evaluate and export.
                - "resume": another number of workers continues from it, with the state and the messages in flight that
                  the old workers saved.
                - "end": the round ends here. Messages in flight, which have arrived, and sums of the round are dropped
                  afterwards, so the average must include them. Momenta and residuals are kept.
                - "outer": a strategy around this one ends its own round here, and calls `restart` afterwards. The hook
                  may change `r` like the end of a round, and may return `r.x` itself.
        """
        if self.traits.equal_replicas:
            return r.x
        if at != "outer":
            return mean_(r.comm, r.x.clone()).wait()
        r.wait_pending()  # messages may still read the parameters
        return mean_(r.comm, r.x).wait()

    def lost(self, r: Replica) -> Sequence[int]:
        """Return the lost ranks without which this strategy continues by itself; no call waits for them."""
        return ()

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute the state that the workers of an earlier run saved over `size` workers.

        By default state that was equal on all workers is kept, and each new worker gets the mean of the rest, which
        preserves means over workers; for residuals of error feedback see `resize_errors`. State that is missing in the
        result is allocated by `start`, at the average for "resume".

        Returns:
            One state for each new worker; None if the state cannot be redistributed.
        """
        if self.traits.on_resize == "start":
            return [{} for _ in range(size)]
        return resize_alike(states, size)

    def before_leave(self, r: Replica, leaving: Sequence[int]) -> None:
        """Pass on the state of workers that are about to leave gracefully; all ranks call it together after a step.

        By default all workers whose parameters differ restart a round at their average, messages in flight included,
        and residuals of error feedback go to other workers, so that no mean misses them.

        Args:
            r: the replica; its comm still has the leaving ranks.
            leaving: the ranks that leave; at least one stays.
        """
        if not (self.traits.equal_replicas or self.traits.averages_at(r.step)):
            r.wait_pending()
            r.x.copy_(self.average(r, "end"))
            self.restart(r)
        hand_on_residuals(r.comm, r.state, leaving)

    def change_view(self, r: Replica, before: int) -> Mapping[str, float]:
        """Continue among other workers after some were lost or have joined; all current workers call it together.

        `r.comm` already has the new ranks. If some survivors lack the result of the last round, its state is restored,
        and the round will be repeated. By default every worker keeps its state. If messages are in flight, or with
        `Traits.on_resize` "restart" or "start", messages are dropped and all restart a round at the mean of their
        parameters; state that is equal on all workers is kept. Finally `regroup` is called.

        Args:
            r: the replica.
            before: the previous number of workers; 0 on a worker that has just joined with another worker's state.

        Returns:
            Figures about lost messages or weights, by name.
        """
        dropped = {"dropped_messages": float(len(r.inflight))} if r.inflight else {}
        if starts_again(self):
            carried = self.resized([dict(r.state)], 1)
            r.inflight.clear()
            r.x.copy_(mean_(r.comm, r.x.clone()).wait())
            r.state.clear()
            r.equal_start = True
            self.start(r)
            r.state.update(carried[0] if carried else {})
        elif r.inflight or any(each.traits.on_resize == "restart" for each in nested(self)):
            r.inflight.clear()
            # Equal parameters need no mean. Workers may also differ in which messages they have in flight, so not all
            # of them would take part in one.
            if not self.traits.equal_replicas:
                r.x.copy_(mean_(r.comm, r.x.clone()).wait())
                self.restart(r)
        self.regroup(r, before)
        return dropped

    def regroup(self, r: Replica, before: int) -> None:
        """Restore invariants of all workers' states, such as a sum, at the end of a change of view.

        All workers call it together. They repeat the call if another worker is lost meanwhile.

        Args:
            r: the replica.
            before: the previous number of workers; 0 on a worker that has just joined with another worker's state.
        """


def weight_of(strategy: Strategy, r: Replica) -> Tensor | None:
    """Return this worker's weight in averages of the parameters; None if all workers have equal weights."""
    name = strategy.traits.rounds.weight
    return r.state[name] if name else None


def resized_parts(
    strategy: Strategy, prefixes: Iterable[str], states: Sequence[Mapping[str, Tensor]], size: int
) -> list[dict[str, Tensor]] | None:
    """Redistribute the state of each part of the vector, as `Strategy.resized`.

    Args:
        strategy: of each part.
        prefixes: of the names in each part's state.
        states: of the workers of an earlier run.
        size: the number of new workers.
    """
    new: list[dict[str, Tensor]] = [{} for _ in range(size)]
    for prefix in prefixes:
        of = [{n.removeprefix(prefix): x for n, x in state.items() if n.startswith(prefix)} for state in states]
        found = strategy.resized(of, size)
        if found is None:
            return None
        for state, part in zip(new, found, strict=True):
            state.update({prefix + name: x for name, x in part.items()})
    return new


def pace_rule(strategy: Strategy) -> str:
    """Describe the training loop that workers with different numbers of steps need, for errors."""
    return (
        f"under {type(strategy).__name__} workers take different numbers of steps. Let every rank loop while "
        "worker.step is below one number, and evaluate, save or switch where it is a multiple of "
        f"{strategy.traits.meets_every}"
    )


def gradient_buffer(strategy: Strategy, x: Tensor) -> Tensor:
    """Allocate `r.g`: a vector like `x` if the strategy uses gradients, otherwise an empty one."""
    traits = strategy.traits
    return torch.zeros_like(x) if traits.sends_gradients or traits.reads_gradient else x.new_empty(0)


def codecs_of(part: Strategy | Codec) -> Iterator[Codec]:
    """Yield the codecs of a strategy, without those of its base, or of a codec; with the codecs inside them."""
    if is_dataclass(part):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, Codec):
                yield value
                yield from codecs_of(value)


def check_workers(strategy: Strategy, size: int, optimizer: Optimizer | None = None) -> None:
    """Check that a strategy, its base and their codecs support this number of workers and this optimizer.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    strategy.check(size, optimizer)
    for part in nested(strategy):
        for codec in codecs_of(part):
            codec.check(size)


def check_blocks(strategy: Strategy, blocks: str) -> None:
    """Check that a strategy works on blocks of the gradient.

    Args:
        strategy: the strategy.
        blocks: how the model is split, for the error.

    Raises:
        ConfigError: it needs the whole gradient.
    """
    for each in nested(strategy):
        if each.traits.needs_whole:
            raise ConfigError(f"{each} {blocks}: {each.traits.needs_whole}")


def starts_again(strategy: Strategy) -> bool:
    """Return True if a strategy, or one inside it, starts from scratch when the number of workers changes."""
    return any(each.traits.on_resize == "start" for each in nested(strategy))


def nested(strategy: Strategy) -> Iterator[Strategy]:
    """Yield a strategy and those inside it, outermost first."""
    yield strategy
    if is_dataclass(strategy):
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if isinstance(value, Strategy):
                yield from nested(value)
