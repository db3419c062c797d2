# SPDX-License-Identifier: Apache-2.0
"""Samplers, which propose trials: at random, or by an Optuna study that learns from finished trials."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

from thinwire.arrays.sweep.space import Choices, Domain, Space
from thinwire.arrays.sweep.trials import Outcome, Trial
from thinwire.errors import ConfigError


class Sampler(Protocol):
    """Proposes trials, and learns from their outcomes."""

    def ask(self, count: int) -> list[Trial]:
        """The next `count` trials, to be trained together."""
        ...

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Record the outcomes of trials that `ask` returned."""
        ...


class RandomSampler:
    """Random search: trial number n depends on the seed and on n only, not on how many trials there are.

    Args:
        space: the search space.
        seed: seed of all draws.
    """

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        self._space, self._seed, self._next = space, seed, 0

    def ask(self, count: int) -> list[Trial]:
        """Return the next trials."""
        numbers = range(self._next, self._next + count)
        self._next += count
        return [Trial(number, self._space.draw(self._seed, number)) for number in numbers]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Does nothing: random search does not learn."""


class OptunaSampler:
    """Trials proposed by an Optuna study, as many at a time as are trained together.

    Args:
        space: the search space.
        seed: seed of the TPE sampler, where `study` is None.
        study: a study that minimises; None makes one with Optuna's TPE sampler.

    Raises:
        ConfigError: Optuna is not installed.
    """

    def __init__(self, space: Space, *, seed: int = 0, study: Any = None) -> None:
        try:
            optuna = import_module("optuna")
        except ModuleNotFoundError:
            raise ConfigError("sampler='optuna': Optuna is not installed; pip install 'thinwire[tune]'") from None
        if study is None:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            # Without the constant liar, trials that are proposed together would all be nearly the same.
            study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True))
        self.study = study
        self._states = optuna.trial.TrialState
        self._distributions = {name: _distribution(optuna, domain) for name, domain in space.domains.items()}
        self._pending: dict[int, Any] = {}

    def ask(self, count: int) -> list[Trial]:
        """Return the study's next trials."""
        proposed = [self.study.ask(self._distributions) for _ in range(count)]
        self._pending.update((each.number, each) for each in proposed)
        return [Trial(each.number, dict(each.params)) for each in proposed]

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Report outcomes to the study: diverged trials as failed, and trials that were stopped early as pruned."""
        for outcome in outcomes:
            trial = self._pending.pop(outcome.trial.number)
            if not math.isfinite(outcome.loss):
                # Failed trials are left out of the study's model.
                self.study.tell(trial, state=self._states.FAIL)
                continue
            # TPE ranks pruned trials by the loss that was reported and by its step.
            trial.report(outcome.loss, outcome.steps)
            if outcome.stopped:
                self.study.tell(trial, state=self._states.PRUNED)
            else:
                self.study.tell(trial, outcome.loss)


def _distribution(optuna: Any, domain: Domain) -> Any:
    if isinstance(domain, Choices):
        return optuna.distributions.CategoricalDistribution(domain.values)
    if domain.scale == "whole":
        return optuna.distributions.IntDistribution(int(domain.low), int(domain.high))
    return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.scale == "log")


def sampler_of(name: str, space: Space, *, seed: int) -> Sampler:
    """Return the sampler called `name`, "random" or "optuna".

    Raises:
        ConfigError: another name, or Optuna is not installed.
    """
    known: Mapping[str, type[RandomSampler] | type[OptunaSampler]] = {"random": RandomSampler, "optuna": OptunaSampler}
    if name not in known:
        raise ConfigError(f"sampler={name!r}: must be one of {', '.join(known)}")
    return known[name](space, seed=seed)
