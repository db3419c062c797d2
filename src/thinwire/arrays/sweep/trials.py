# SPDX-License-Identifier: Apache-2.0
"""Trials of a sweep, their outcomes, and the rule that stops some of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.arrays.sweep.space import Hyperparameters, Value
from thinwire.core.validation import check_ranges

FUSIBLE = (
    *("lr", "momentum", "weight_decay", "beta1", "beta2", "eps", "alpha", "rho", "lr_decay"),
    *("rank", "lora_alpha", "lora_dropout", "adapter_seed"),
)
"""The hyperparameters in which members of one array may differ."""


@dataclass(frozen=True)
class Trial:
    """One choice of hyperparameters.

    Args:
        number: counted from 0 in a sweep.
        hyperparameters: the values that were chosen; the task's defaults fill in the others.
    """

    number: int
    hyperparameters: Hyperparameters


@dataclass(frozen=True)
class Outcome:
    """The results of a trial so far.

    Args:
        trial: the trial, with its present hyperparameters.
        loss: held-out loss in nats; NaN or infinite where the trial has diverged.
        metric: the task's own metric, held out.
        steps: optimizer steps so far.
        stopped: whether the trial was stopped early.
    """

    trial: Trial
    loss: float
    metric: float
    steps: int
    stopped: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "trial": self.trial.number,
            "loss": self.loss,
            "metric": self.metric,
            "steps": self.steps,
            "stopped": self.stopped,
            "hyperparameters": dict(self.trial.hyperparameters),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Outcome:
        """Reverse `to_json`."""
        trial = Trial(fields["trial"], fields["hyperparameters"])
        return cls(trial, fields["loss"], fields["metric"], fields["steps"], fields["stopped"])


def ranked(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Outcomes, best first: more steps, then lower loss, then lower number; diverged ones last."""

    def key(outcome: Outcome) -> tuple[bool, int, float, int]:
        # NaN compares false with everything, which would leave the order undefined.
        finite = math.isfinite(outcome.loss)
        return not finite, -outcome.steps, outcome.loss if finite else 0.0, outcome.trial.number

    return sorted(outcomes, key=key)


def partition(trials: Sequence[Trial], fusible: Collection[str]) -> list[list[Trial]]:
    """Groups of trials that can share an array: equal in every hyperparameter that cannot be fused.

    Args:
        trials: all trials.
        fusible: the hyperparameters in which members of an array may differ.
    """
    groups: dict[tuple[tuple[str, Value], ...], list[Trial]] = {}
    for trial in trials:
        fixed = tuple(sorted((name, value) for name, value in trial.hyperparameters.items() if name not in fusible))
        groups.setdefault(fixed, []).append(trial)
    return list(groups.values())


@dataclass(frozen=True)
class Halving:
    r"""Successive halving: at each rung only the best trials continue, so that most steps go to the most promising.

    Rungs are at $s, s\eta, s\eta^2, \dots$ steps; at each, $\lceil m/\eta \rceil$ of $m$ trials continue.

    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization, AISTATS 2016,
    arXiv:1502.07943, Algorithm 1.

    Args:
        first: $s$, steps of every trial before the first rung; more is a later and better judgement, and costs more.
        keep: $\eta$, one of so many trials continues; more stops more trials at each rung.

    Raises:
        ConfigError: `first` is less than 1, or `keep` less than 2.
    """

    first: int
    keep: int = 3

    def __post_init__(self) -> None:
        check_ranges(self, first=("1..", "Trials train before they are judged"), keep=("2..", "3 is usual"))

    def rungs(self, steps: int) -> list[int]:
        """Return the numbers of steps after which trials are stopped, in a sweep of `steps` steps."""
        found, rung = list[int](), self.first
        while rung < steps:
            found.append(rung)
            rung *= self.keep
        return found

    def promoted(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Return the trials that continue, best first; diverged ones only where too few others are left."""
        return ranked(outcomes)[: math.ceil(len(outcomes) / self.keep)]
