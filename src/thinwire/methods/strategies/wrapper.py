# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies that wrap another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, wraps
from inspect import signature
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, nested
from thinwire.methods.strategies.traits import Traits

_PREFIX = "base/"

SOURCES: dict[str, Literal["base", "both", "own"]] = {
    "period": "base",
    "steady_from": "base",
    "topology": "base",
    "sends_gradients": "base",
    "reads_gradient": "base",
    "equal_replicas": "base",
    "needs_equal_start": "base",
    "rounds": "base",
    "skips_steps": "base",
    "timing_dependent": "base",
    "data_dependent_bytes": "base",
    "elementwise": "base",
    "lr_factor": "base",
    # These describe one class alone; code that reads them looks at the base too.
    "on_resize": "own",
    "feeds_back": "own",
    "growing": "own",
    "inelastic": "own",
    "needs_whole": "own",
    # Hooks.
    "check": "both",
    "start": "base",
    "on_gradient": "base",
    "before_step": "base",
    "after_step": "base",
    "ends_round": "own",  # it reads the wrapper's traits
    "restart": "base",
    "regroup": "base",
    "lost": "base",
    "average": "base",
    "resized": "both",
    "before_leave": "own",  # it reads the state of both
    "change_view": "own",  # the wrapper's state refers to the base's parameters, and restarts when these do
}
"""Where each trait and hook of a wrapper comes from, unless its class overrides it.

"base" is the base's, called with the base's replica; "own" is that of any strategy, and not the base's; "both" is
written in `Wrapper`.
"""


class Wrapper(Strategy):
    """A strategy around another one, its base.

    Its hooks and traits are the base's, as the table `SOURCES` says, unless a class overrides them. The base has names
    of its own for state and messages: it is given `inner(r)`, so neither can overwrite the other's. A wrapper that sets
    the parameters calls the base's `restart` afterwards.

    Attributes:
        base: the strategy that is wrapped.

    Example:
        A wrapper that counts the steps of any strategy, whose state cannot collide with the counter:

        >>> from dataclasses import dataclass
        >>> import torch, thinwire
        >>> from thinwire.methods.strategies.wrapper import Wrapper
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

    @cached_property
    def traits(self) -> Traits:
        """The base's, but for those that describe one class alone."""
        plain, rounds = Traits(), self.base.traits.rounds
        # A class that postpones reads `Replica.postponed` itself. The weight lies in the base's state.
        rounds = replace(rounds, postpones=False, weight=rounds.weight and _PREFIX + rounds.weight)
        return replace(self.base.traits, rounds=rounds, **{name: getattr(plain, name) for name in _OWN_TRAITS})

    def inner(self, r: Replica) -> Replica:
        """The replica that the base is given: the same vectors, other names."""
        return r.part("base")

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """As the base; and refuse one whose late workers leave out steps, and a second wrapper of the same kind."""
        if any(type(each) is type(self) for each in nested(self.base)):
            name = type(self).__name__
            raise ConfigError(f"{self}: {name} around {name} does one thing twice. Keep one of them")
        if self.base.traits.skips_steps:
            raise ConfigError(
                f"{type(self).__name__} around {self.base}: a late worker leaves out steps, which the strategy around "
                "it would miss. Use it alone, or AllReduce() as the base"
            )
        self.base.check(size, optimizer)

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


def _of_base(name: str) -> Callable[..., Any]:
    """A hook that calls the base's."""
    hook: Callable[..., Any] = getattr(Strategy, name)
    takes_replica = "r" in signature(hook).parameters

    @wraps(hook)
    def forwarded(self: Wrapper, *arguments: Any, **named: Any) -> Any:
        if takes_replica:
            arguments = (self.inner(arguments[0]), *arguments[1:])
        return getattr(self.base, name)(*arguments, **named)

    return forwarded


_TRAITS = {each.name for each in fields(Traits)}
_OWN_TRAITS = [name for name, source in SOURCES.items() if source == "own" and name in _TRAITS]
for _name, _source in SOURCES.items():
    if _source == "base" and _name not in _TRAITS:
        setattr(Wrapper, _name, _of_base(_name))
