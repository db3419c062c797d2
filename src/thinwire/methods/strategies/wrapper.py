# SPDX-License-Identifier: Apache-2.0
"""The base class of strategies that wrap another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import wraps
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.replica.replica import Replica
from thinwire.errors import ConfigError
from thinwire.methods.strategies.base import Strategy, Traits, nested

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
    "lr_factor": "base",
    # These describe one class only; code that reads them checks the base too.
    "on_resize": "own",
    "feeds_back": "own",
    "growing": "own",
    "inelastic": "own",
    "needs_whole": "own",
    "reads_loss": "own",
    # Hooks.
    "check": "both",
    "start": "base",
    "on_gradient": "base",
    "before_step": "base",
    "after_step": "base",
    "fragments_in": "base",
    "ends_round": "own",  # it reads the wrapper's traits
    "restart": "base",
    "regroup": "base",
    "lost": "base",
    "average": "base",
    "resized": "both",
    "before_leave": "own",  # reads the state of both
    "change_view": "own",  # the wrapper's state refers to the base's parameters, and restarts when these do
}
"""The source of each trait and hook of a wrapper, unless its class overrides it.

"base" is the base's, called with the base's replica; "own" is the default of `Strategy`; "both" is defined in
`Wrapper`.
"""


class Wrapper(Strategy):
    """A strategy around another one, its base.

    It takes hooks and traits from the base, according to the table `SOURCES`, unless the class overrides them. The base
    gets the replica `inner(r)`, whose state and messages have separate names, so neither can overwrite the other's. A
    wrapper that sets the parameters must call the base's `restart` afterwards.

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

    def make_traits(self) -> Traits:
        """The base's traits, except those that describe one class only."""
        plain, rounds = Traits(), self.base.traits.rounds
        # A class that postpones reads `Replica.postponed` itself. The weight is in the base's state.
        rounds = replace(rounds, postpones=False, weight=rounds.weight and _PREFIX + rounds.weight)
        return replace(self.base.traits, rounds=rounds, **{name: getattr(plain, name) for name in _OWN_TRAITS})

    def inner(self, r: Replica) -> Replica:
        """Return the base's replica: the same vectors, with separate names."""
        return r.part("base")

    def inners(self, r: Replica) -> Iterable[Replica]:
        """Return the replicas on which the base's hooks run, one after the other."""
        return (self.inner(r),)

    def check(self, size: int, optimizer: Optimizer | None = None) -> None:
        """Run the base's check; the base must not skip steps, nor contain a wrapper of the same kind."""
        if any(type(each) is type(self) for each in nested(self.base)):
            name = type(self).__name__
            raise ConfigError(f"{self}: {name} around {name} does one thing twice. Keep one of them")
        if self.base.traits.skips_steps:
            raise ConfigError(
                f"{type(self).__name__} around {self.base}: a late worker skips steps, which the wrapper would miss. "
                "Use the base alone, or AllReduce() as the base"
            )
        self.base.check(size, optimizer)

    def resized(self, states: Sequence[Mapping[str, Tensor]], size: int) -> list[dict[str, Tensor]] | None:
        """Redistribute the base's state with the base's hook, and the wrapper's own with the default."""
        inner = self.base.resized([_named(state, inside=True) for state in states], size)
        own = super().resized([_named(state, inside=False) for state in states], size)
        if inner is None or own is None:
            return None
        return [mine | {_PREFIX + name: x for name, x in base.items()} for mine, base in zip(own, inner, strict=True)]


def _named(state: Mapping[str, Tensor], *, inside: bool) -> dict[str, Tensor]:
    """Return the base's entries, without the prefix of their names, or the wrapper's own."""
    names = [name for name in state if name.startswith(_PREFIX) == inside]
    return {name.removeprefix(_PREFIX) if inside else name: state[name] for name in names}


def _of_base(name: str) -> Callable[..., Any]:
    """Return a hook that calls the base's."""

    @wraps(getattr(Strategy, name))
    def forwarded(self: Wrapper, r: Replica, *arguments: Any, **named: Any) -> Any:
        *_, found = [getattr(self.base, name)(inner, *arguments, **named) for inner in self.inners(r)]
        return found

    return forwarded


_TRAITS = {each.name for each in fields(Traits)}
_OWN_TRAITS = [name for name, source in SOURCES.items() if source == "own" and name in _TRAITS]
for _name, _source in SOURCES.items():
    if _source == "base" and _name not in _TRAITS:
        setattr(Wrapper, _name, _of_base(_name))
