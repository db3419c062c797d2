"""Who says which trials come next: chance, or a study of Optuna that learns from those that have ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from thinwire.errors import ConfigError
from thinwire.sweep.space import Choices, Domain, Space, Value
from thinwire.sweep.trials import Outcome, Trial


class Sampler(Protocol):
    """Proposes trials, and is told what has come of them."""

    def ask(self, count: int) -> list[Trial]:
        """The next trials, to be trained at once."""
        ...

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """What has come of trials that were asked for."""
        ...


class RandomSampler:
    """Trials by chance: what trial number n is does not depend on how many others there are.

    Args:
        space: to draw from.
        seed: of all draws.
    """

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self._space, self._seed, self._next = space, seed, 0

    def ask(self, count: int) -> list[Trial]:
        """The next draws."""
        numbers = range(self._next, self._next + count)
        self._next += count
        return [Trial(number, self._space.draw(self._seed, number)) for number in numbers]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Chance does not learn."""


class OptunaSampler:
    """Trials proposed by a study of Optuna, a whole array at a time.

    Args:
        space: what it may propose.
        seed: of its sampler, where it makes the study itself.
        study: one of your own, which minimises; None makes one with Optuna's TPE sampler.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, space: Space, *, seed: int = 0, study: Any = None) -> None:
        try:
            optuna = import_module("optuna")
        except ModuleNotFoundError:
            raise ConfigError("sampler='optuna': is not installed; pip install 'thinwire[tune]'") from None
        if study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            # Trials that are being trained together must not all be the same guess.
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
        self.study = study
        self._states = optuna.trial.TrialState
        self._distributions = {name: _distribution(optuna, domain) for name, domain in space.domains.items()}
        self._asked: dict[int, Any] = {}

    def ask(self, count: int) -> list[Trial]:
        """The study's next proposals."""
        asked = [self.study.ask(self._distributions) for _ in range(count)]
        self._asked.update((each.number, each) for each in asked)
        return [Trial(each.number, dict(each.params)) for each in asked]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Tell the study; trials that diverged have failed, those given up were pruned."""
        for outcome in outcomes:
            asked = self._asked.pop(outcome.trial.number)
            if not math.isfinite(outcome.loss):
                self.study.tell(asked, state=self._states.FAIL)
                continue
            asked.report(outcome.loss, outcome.steps)
            if outcome.stopped:
                self.study.tell(asked, state=self._states.PRUNED)
            else:
                self.study.tell(asked, outcome.loss)


def _distribution(optuna: Any, domain: Domain) -> Any:
    if isinstance(domain, Choices):
        return optuna.distributions.CategoricalDistribution(domain.values)
    if domain.scale == "whole":
        return optuna.distributions.IntDistribution(int(domain.low), int(domain.high))
    return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.scale == "log")


def sampler_of(name: str, space: Space, *, seed: int) -> Sampler:
    """The sampler of that name, "random" or "optuna".

    Raises:
        ConfigError: there is none, or Optuna is not installed.
    """
    known: Mapping[str, type[RandomSampler] | type[OptunaSampler]] = {"random": RandomSampler, "optuna": OptunaSampler}
    if name not in known:
        raise ConfigError(f"sampler={name!r}: there are {', '.join(known)}")
    return known[name](space, seed=seed)


__all__ = ["OptunaSampler", "RandomSampler", "Sampler", "Value", "sampler_of"]
