"""Trials of a sweep: what each is made with, and what has come of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from thinwire.errors import ConfigError
from thinwire.sweep.space import Hyperparameters, Value

FUSIBLE = ("lr", "momentum", "weight_decay", "beta1", "beta2", "eps")
"""The hyperparameters in which members of one array may differ."""


@dataclass(frozen=True)
class Trial:
    """One setting of all hyperparameters.

    Args:
        number: from 0; decides its first parameters where they are its own.
        hyperparameters: what it is made with.
    """

    number: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Copy:
    """When a member of a population went on as a copy of another, with other hyperparameters.

    Args:
        step: after so many.
        source: the number of the trial whose copy it became.
        hyperparameters: all that it went on with.
    """

    step: int
    source: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Outcome:
    """What has come of a trial so far.

    Args:
        trial: which, with the hyperparameters that it has now.
        loss: held out, in nats; NaN where it has diverged.
        metric: the task's own measure.
        steps: optimizer steps it has had.
        stopped: it was given up before its time.
        copies: how it came to what it is, in a population: whose copy it became, the earliest first.
    """

    trial: Trial
    loss: float
    metric: float
    steps: int
    stopped: bool = False
    copies: tuple[Copy, ...] = ()


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The best first: those with more steps, then the lowest loss; diverged ones last, ties by number."""

    def key(outcome: Outcome) -> tuple[bool, int, float, int]:
        finite = math.isfinite(outcome.loss)
        return not finite, -outcome.steps, outcome.loss if finite else 0.0, outcome.trial.number

    return sorted(outcomes, key=key)


def partition(trials: Sequence[Trial], fusible: Collection[str]) -> list[list[Trial]]:
    """Trials that can be trained as one array: those alike in every hyperparameter that cannot be fused.

    Args:
        trials: all.
        fusible: the hyperparameters in which members of an array may differ.
    """
    groups: dict[tuple[tuple[str, Value], ...], list[Trial]] = {}
    for trial in trials:
        fixed = tuple(sorted((name, value) for name, value in trial.hyperparameters.items() if name not in fusible))
        groups.setdefault(fixed, []).append(trial)
    return list(groups.values())


@dataclass(frozen=True)
class Halving:
    r"""Successive halving: at each rung only the best go on, so that most steps go to the most promising.

    Rungs are at $s, s\eta, s\eta^2, \dots$ steps; at each, $\lceil m/\eta \rceil$ of $m$ trials go on.

    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016,
    arXiv:1502.07943, Algorithm 1.

    Args:
        first: $s$, steps of every trial before the first rung; more judges later and costs more.
        keep: $\eta$, of so many trials one goes on; more is bolder.

    Raises:
        ConfigError: no steps before the first rung, or nobody to give up.
    """

    first: int
    keep: int = 3

    def __post_init__(self) -> None:
        if self.first < 1:
            raise ConfigError(f"first={self.first}: trials need at least 1 step before they are judged")
        if self.keep < 2:
            raise ConfigError(f"keep={self.keep}: one of at least 2 goes on; 3 is usual")

    def rungs(self, steps: int) -> list[int]:
        """The steps after which trials are given up, in a sweep of so many."""
        found, rung = list[int](), self.first
        while rung < steps:
            found.append(rung)
            rung *= self.keep
        return found

    def promoted(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Who goes on, the best first; diverged ones only where nobody else is left."""
        return ranked(outcomes)[: math.ceil(len(outcomes) / self.keep)]
