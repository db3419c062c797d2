# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies: hyperparameters, and a few hooks around the optimizer's step."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Work
from thinwire.core.replica.replica import Replica
from thinwire.methods.codecs.base import Codec
from thinwire.methods.codecs.feedback import resize_alike
from thinwire.methods.reduce.compressed_all_reduce import mean_
from thinwire.methods.reduce.leaving import hand_on_residuals
from thinwire.methods.strategies.traits import Traits
from thinwire.registry import Recipe


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
        ...             self.average_(r)
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

    def check(self, size: int) -> None:
        """Refuse a number of workers that the recipe does not work with, before anything is sent.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that does not work with this recipe, such as one with a second momentum.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """

    def check_blocks(self, blocks: str) -> None:
        """Refuse vectors of which this is one block: of tensor parallelism, or a fragment of `Streaming`.

        Args:
            blocks: how it is split, for the error.

        Raises:
            ConfigError: it needs the norm or the whole gradient of the model.
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

    def restart(self, r: Replica) -> None:
        """Restart a round at `r.x`, which something else has just set, such as the slow step of a wrapper.

        Drop what is in flight, and set what refers to the parameters as they were, such as an anchor, to the new ones;
        momenta and residuals stay. All ranks call it together, with equal parameters unless `holds_average`.
        """

    def lost(self, r: Replica) -> Sequence[int]:
        """The ranks that are lost, and that this strategy goes on without, by itself; no call waits for them."""
        return ()

    def holds_average(self, size: int) -> bool:
        """Whether each worker's own `r.x` is its estimate of the average, as `SlowMo(exact=False)` takes it to be.

        It is not where a share of the average is in flight or in the state, nor where the state refers to a point that
        all workers have in common.

        Args:
            size: the number of workers.
        """
        return self.traits.equal_replicas

    def average_(self, r: Replica) -> None:
        """Replace `r.x` on every rank by the exact average over workers, messages in flight included."""
        if not self.traits.equal_replicas:
            mean_(r.comm, r.x).wait()

    def averages_at(self, step: int) -> bool:
        """Whether all workers go on from one average of their parameters after that many steps."""
        return False

    def weight(self, r: Replica) -> Tensor | None:
        """This worker's weight in averages of the parameters, a number; None where all workers weigh the same."""
        return None

    def consensus(self, r: Replica) -> Tensor:
        """The vector to evaluate and export, equal on all ranks; `r` is not changed."""
        return r.x if self.traits.equal_replicas else mean_(r.comm, r.x.clone()).wait()

    def resume_point(self, r: Replica) -> Tensor:
        """The parameters from which another number of workers goes on, equal on all ranks; `r` is not changed.

        A collective call of the workers that were, with their state and messages in flight as they were saved.
        """
        return self.consensus(r)

    def end_point(self, r: Replica) -> Tensor:
        """The parameters from which all go on if the round ends here, equal on all ranks; `r.x` is not changed.

        A collective call, when messages in flight have been waited for. What is in flight, and a sum of the round, are
        dropped after it, so that it must hold what they say; at `resume_point` they go on. Residuals stay as they are.
        """
        return self.resume_point(r)

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """The state of each of `size` workers, from the state that every worker of an earlier run saved.

        Here what is equal on all workers stays; of the rest each new worker gets the mean, so that what a mean over
        workers would find is kept: momenta, residuals of error feedback (`resize_errors`), points where workers were.
        What the result lacks is as `start` makes it at the parameters of `resume_point`.

        Returns:
            None where the state cannot be redistributed.
        """
        if self.traits.restarts_on_resize:
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
        if not (self.traits.equal_replicas or self.averages_at(r.step)):
            r.wait_pending()
            r.x.copy_(self.end_point(r))
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
        if any(each.traits.restarts_on_resize for each in nested(self)):
            carried = self.resized([dict(r.state)], 1)
            r.inflight.clear()
            r.x.copy_(mean_(r.comm, r.x.clone()).wait())
            r.state.clear()
            r.equal_start = True
            self.start(r)
            r.state.update(carried[0] if carried else {})
        elif r.inflight or any(each.traits.tracks_mean for each in nested(self)):
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


def check_workers(strategy: Strategy, size: int) -> None:
    """Refuse a number of workers that a strategy, its base or one of its codecs does not work with.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    strategy.check(size)
    for part in nested(strategy):
        for codec in codecs_of(part):
            codec.check(size)


def nested(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and those that it is made of, outermost first."""
    yield strategy
    if is_dataclass(strategy):
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if isinstance(value, Strategy):
                yield from nested(value)
