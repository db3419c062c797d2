# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies: hyperparameters, and a few hooks around the optimizer's step."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
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
from thinwire.methods.strategies.traits import Traits
from thinwire.registry import Recipe

At = Literal["now", "resume", "end", "outer"]
"""What an average is for; see `Strategy.average`."""


class Strategy(Recipe, ABC):
    """A frozen dataclass of hyperparameters that decides what workers send, and when.

    It holds no tensor: everything that changes lies in the `Replica` that each hook is given. Its repr is the recipe.
    Every hook may be left as it is; without any, workers send nothing. All ranks call the hooks in the same order.

    Attributes:
        paper: where the method comes from.
        waits: which worker waits for which, and when.
        limits: what it assumes, and when not to use it.
        traits: what other packages need to know about it; see `Traits`. A class whose traits are not the defaults
            overrides it by a `cached_property` that returns others.

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
    waits: ClassVar[str] = "no worker waits for another"
    limits: ClassVar[str] = ""

    @cached_property
    def traits(self) -> Traits:
        """The defaults: it averages parameters in its hooks, and nothing more is known of it."""
        return Traits()

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Refuse a number of workers or an optimizer that the recipe does not support, before anything is sent.

        Args:
            size: the number of workers.
            optimizer: each worker's optimizer; None if it is not known yet.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def start(self, r: Replica) -> None:
        """Allocate `r.state`; `r.x` holds the initial parameters, equal on all ranks if `r.equal_start`."""

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """Start to send `r.g[part]`, which is final. Parts arrive in one fixed order; the engine waits for the work."""

    def before_step(self, r: Replica) -> None:
        """Runs once a step, before the optimizer changes `r.x`.

        The gradient is complete where the strategy says that it `reads_gradient`. For others it may still have to be
        computed, by the closure that the optimizer's step was given. Weight decay acts on the parameters that the
        optimizer finds, so a strategy whose gradients belong to `r.x` as it is now moves it in `after_step`.
        """

    def after_step(self, r: Replica) -> None:
        """Runs when the optimizer has changed `r.x`; `r.step` includes this step already."""

    def ends_round(self, r: Replica) -> bool:
        """Return True if the step just taken ends this worker's round; asked before `after_step`."""
        return self.traits.averages_at(r.step)

    def restart(self, r: Replica) -> None:
        """Restart a round at `r.x`, which something else has just set, such as the slow step of a wrapper.

        Drop messages in flight, and set to the new parameters what refers to the old ones, such as an anchor. Momenta
        and residuals stay. All ranks call it together, with equal parameters unless `Rounds.estimates`.
        """

    def average(self, r: Replica, at: At = "now") -> Tensor:
        """Return the average of all workers' parameters, equal on all ranks; all call it together.

        `Traits.averages_at` says when all workers continue from it anyway.

        Args:
            r: the replica, which stays unchanged, but for "outer".
            at: what the average is for.

                - "now": the model to evaluate and export.
                - "resume": another number of workers continues from it, with the old workers' state and messages in
                  flight as they were saved.
                - "end": the round ends here. Messages in flight, which have arrived, and sums of the round are dropped
                  afterwards, so it must contain what they add. Momenta and residuals stay.
                - "outer": a strategy around this one ends its own round here, and calls `restart` afterwards. It may
                  change `r` as the end of a round does, and may be `r.x` itself.
        """
        if self.traits.equal_replicas:
            return r.x
        if at != "outer":
            return mean_(r.comm, r.x.clone()).wait()
        r.wait_pending()  # messages may be sent from the memory of the parameters
        return mean_(r.comm, r.x).wait()

    def lost(self, r: Replica) -> Sequence[int]:
        """The ranks that are lost, and that this strategy goes on without, by itself; no call waits for them."""
        return ()

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """The state of each of `size` workers, from the state that every worker of an earlier run saved.

        Here what is equal on all workers stays; of the rest each new worker gets the mean, so that what a mean over
        workers would find is kept: momenta, residuals of error feedback (`resize_errors`), points where workers were.
        What the result lacks is as `start` makes it, at the average for "resume".

        Returns:
            None where the state cannot be redistributed.
        """
        if self.traits.on_resize == "start":
            return [{} for _ in range(size)]
        return resize_alike(states, size)

    def before_leave(self, r: Replica, leaving: Sequence[int]) -> None:
        """Hand on what only workers that leave with notice have; all call it together, after a step and before they go.

        Here all take the mean of their parameters, messages in flight included, and begin a round there, unless they
        have equal parameters anyway; and residuals of error feedback go to neighbours, so that no mean misses them.

        Args:
            r: the replica, among the ranks of before.
            leaving: the ranks that leave; at least one stays.
        """
        if not (self.traits.equal_replicas or self.traits.averages_at(r.step)):
            r.wait_pending()
            r.x.copy_(self.average(r, "end"))
            self.restart(r)
        hand_on_residuals(r.comm, r.state, leaving)

    def change_view(self, r: Replica, before: int) -> Mapping[str, float]:
        """Go on among other workers: some were lost, or some have joined; all that are there now call it together.

        `r.comm` has the new ranks already. A round that not all survivors have the result of is as before its first
        message: it will be repeated. Here state and residuals stay, those of lost workers are lost with them. Where
        something is in flight, or the state belongs to a graph of ranks or to a mean that tracks all workers, the
        messages are dropped, all take the mean of their parameters, and restart a round there; what is equal on all
        workers, such as slow momentum, stays. In the end `regroup` puts right what must hold among all of them.

        Args:
            r: the replica.
            before: the number of workers before; 0 on one that has just joined, with another worker's state.

        Returns:
            What was lost, by name.
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
            # Equal parameters need no mean. Some workers may have used the message that others still have in flight, so
            # that not all would take part in one.
            if not self.traits.equal_replicas:
                r.x.copy_(mean_(r.comm, r.x.clone()).wait())
                self.restart(r)
        self.regroup(r, before)
        return dropped

    def regroup(self, r: Replica, before: int) -> None:
        """Put right what must hold among all workers' states, such as a sum; the end of a change of view.

        All workers call it together, and perhaps once more, where another one is lost meanwhile.

        Args:
            r: the replica.
            before: the number of workers before; 0 on one that has just joined, with another worker's state.
        """


def weight_of(strategy: Strategy, r: Replica) -> Tensor | None:
    """This worker's weight in averages of the parameters, a number; None where all workers weigh the same."""
    name = strategy.traits.rounds.weight
    return r.state[name] if name else None


def pace_rule(strategy: Strategy) -> str:
    """How to write the loop of workers that meet only after multiples of some steps, for errors."""
    return (
        f"under {type(strategy).__name__} workers take different numbers of steps. Let every rank loop while "
        "worker.step is below one number, and evaluate, save or switch where it is a multiple of "
        f"{strategy.traits.meets_every}"
    )


def gradient_buffer(strategy: Strategy, x: Tensor) -> Tensor:
    """A vector for `r.g`: like `x` where the strategy uses gradients, empty elsewhere."""
    traits = strategy.traits
    return torch.zeros_like(x) if traits.sends_gradients or traits.reads_gradient else x.new_empty(0)


def codecs_of(part: Strategy | Codec) -> Iterator[Codec]:
    """The codecs of a strategy, but for those of its base, and those inside them; or those inside a codec."""
    if is_dataclass(part):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, Codec):
                yield value
                yield from codecs_of(value)


def check_workers(strategy: Strategy, size: int, optimizer: Optimizer | None = None) -> None:
    """Refuse a number of workers or an optimizer that a strategy, its base or one of its codecs does not work with.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    strategy.check(size, optimizer)
    for part in nested(strategy):
        for codec in codecs_of(part):
            codec.check(size)


def check_blocks(strategy: Strategy, blocks: str) -> None:
    """Refuse a strategy that needs the whole gradient, where each of its vectors is one block of it.

    Args:
        strategy: the recipe.
        blocks: how the model is split, for the error.

    Raises:
        ConfigError: with the reason.
    """
    for each in nested(strategy):
        if each.traits.needs_whole:
            raise ConfigError(f"{each} {blocks}: {each.traits.needs_whole}")


def starts_again(strategy: Strategy) -> bool:
    """Whether a strategy, or one that it is made of, starts from scratch among another number of workers."""
    return any(each.traits.on_resize == "start" for each in nested(strategy))


def nested(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and those that it is made of, outermost first."""
    yield strategy
    if is_dataclass(strategy):
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if isinstance(value, Strategy):
                yield from nested(value)
