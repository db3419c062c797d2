# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies that wrap another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from thinwire.comm.work import Work
from thinwire.errors import ConfigError
from thinwire.replica.replica import Replica
from thinwire.strategies.base import Strategy, nested, trait

_PREFIX = "base/"


class Wrapper(Strategy):
    """A strategy around another one, its base: every hook and trait is the base's unless a subclass overrides it.

    The base has a namespace of its own: it is given `inner(r)`, whose state and messages have names of their own, so
    that neither can overwrite the other's. A wrapper that sets the parameters calls the base's `restart` afterwards.

    Attributes:
        base: the strategy that is wrapped.

    Example:
        A wrapper that counts the steps of any strategy, whose state cannot collide with the counter:

        >>> from dataclasses import dataclass
        >>> import torch, thinwire
        >>> from thinwire.strategies.wrapper import Wrapper
        >>> @dataclass(frozen=True)
        ... class Counted(Wrapper):
        ...     base: thinwire.Strategy
        ...     def after_step(self, r):
        ...         r.zeros_state("steps").add_(1)
        ...         super().after_step(r)
        >>> def train(comm):
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ...     worker = thinwire.attach(model, optimizer, Counted(thinwire.DecentLaM()), comm=comm)
        ...     model.weight.grad = torch.ones(1, 1)
        ...     optimizer.step()
        ...     return sorted(worker.replicas[0].state)
        >>> thinwire.run_threads(2, train)[0]
        ['base/anchor', 'base/momentum', 'steps']
    """

    base: Strategy

    sends_gradients = trait(lambda self: self.base.sends_gradients)
    reads_gradient = trait(lambda self: self.base.reads_gradient)
    moves_parameters = trait(lambda self: self.base.moves_parameters)
    skips_steps = trait(lambda self: self.base.skips_steps)
    skips_nonfinite = trait(lambda self: self.base.skips_nonfinite)
    timing_dependent = trait(lambda self: self.base.timing_dependent)
    data_dependent_bytes = trait(lambda self: self.base.data_dependent_bytes)
    elementwise = trait(lambda self: self.base.elementwise)
    has_period = trait(lambda self: self.base.has_period)
    steady_from = trait(lambda self: self.base.steady_from)
    needs_equal_start = trait(lambda self: self.base.needs_equal_start)
    equal_replicas = trait(lambda self: self.base.equal_replicas)
    local_rounds = trait(lambda self: self.base.local_rounds)
    meets_every = trait(lambda self: self.base.meets_every)
    lr_factor = trait(lambda self: self.base.lr_factor)
    # `plain_average` stays a statement about a class's own `average_`: a wrapper's takes the base's state with it, such
    # as a round that ends, and must not be replaced by a plain mean of the parameters. `growing`, `feeds_back`,
    # `restarts_on_resize`, `tracks_mean` and `inelastic` speak of a class itself; who asks for them looks at the base,
    # too. So does `change_view`: what the wrapper keeps refers to the base's parameters, and must begin anew when these
    # do; what must hold among all workers' states is the base's `regroup`'s.
    # `before_leave` looks at the state of both. A class that `postpones` looks at `Replica.postponed` itself.

    def inner(self, r: Replica) -> Replica:
        """The replica that the base is given: the same vectors, other names."""
        return r.part("base")

    def gradient_buffer(self, x: Tensor) -> Tensor:
        """As the base."""
        return self.base.gradient_buffer(x)

    def check(self, size: int) -> None:
        """As the base; and refuse one whose late workers leave out steps, and a second wrapper of the same kind."""
        if any(type(each) is type(self) for each in nested(self.base)):
            name = type(self).__name__
            raise ConfigError(f"{self}: {name} around {name} does one thing twice; keep one of them")
        if self.base.skips_steps:
            raise ConfigError(
                f"{type(self).__name__} around {self.base}: a late worker leaves out steps, which the strategy around "
                "it would miss; use it alone, or AllReduce() as the base"
            )
        self.base.check(size)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """As the base."""
        self.base.check_optimizer(optimizer)

    def check_blocks(self, blocks: str) -> None:
        """As the base."""
        self.base.check_blocks(blocks)

    def start(self, r: Replica) -> None:
        """As the base."""
        self.base.start(self.inner(r))

    def on_gradient(self, r: Replica, part: slice) -> Work[Tensor] | None:
        """As the base."""
        return self.base.on_gradient(self.inner(r), part)

    def before_step(self, r: Replica) -> None:
        """As the base."""
        self.base.before_step(self.inner(r))

    def after_step(self, r: Replica) -> None:
        """As the base."""
        self.base.after_step(self.inner(r))

    def restart(self, r: Replica) -> None:
        """As the base."""
        self.base.restart(self.inner(r))

    def regroup(self, r: Replica, before: int) -> None:
        """As the base."""
        self.base.regroup(self.inner(r), before)

    def lost(self, r: Replica) -> Sequence[int]:
        """As the base."""
        return self.base.lost(self.inner(r))

    def holds_average(self, size: int) -> bool:
        """As the base."""
        return self.base.holds_average(size)

    def average_(self, r: Replica) -> None:
        """As the base."""
        self.base.average_(self.inner(r))

    def averages_at(self, step: int) -> bool:
        """As the base."""
        return self.base.averages_at(step)

    def weight(self, r: Replica) -> Tensor | None:
        """As the base."""
        return self.base.weight(self.inner(r))

    def consensus(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.consensus(self.inner(r))

    def resume_point(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.resume_point(self.inner(r))

    def end_point(self, r: Replica) -> Tensor:
        """As the base."""
        return self.base.end_point(self.inner(r))

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """The base's state as the base redistributes it; the wrapper's own as any strategy's."""
        inner = self.base.resized([_named(state, inside=True) for state in states], size)
        own = super().resized([_named(state, inside=False) for state in states], size)
        if inner is None or own is None:
            return None
        return [mine | {_PREFIX + name: x for name, x in base.items()} for mine, base in zip(own, inner, strict=True)]


def _named(state: Mapping[str, Tensor], *, inside: bool) -> dict[str, Tensor]:
    """The entries of the base by their names within it, or those of the wrapper."""
    names = [name for name in state if name.startswith(_PREFIX) == inside]
    return {name.removeprefix(_PREFIX) if inside else name: state[name] for name in names}


def period_of(strategy: Strategy) -> int | None:
    """The number of steps between a strategy's communications, or its base's; None if it has none."""
    if not strategy.has_period:
        return None
    found = getattr(strategy, "period", None)
    return found if isinstance(found, int) else period_of(strategy.base) if isinstance(strategy, Wrapper) else None
