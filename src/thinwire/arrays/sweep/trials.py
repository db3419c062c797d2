# SPDX-License-Identifier: Apache-2.0
"""Trials of a sweep, their outcomes, and the rules that stop some of them or copy better ones over them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.arrays.sweep.space import Hyperparameters, Value
from thinwire.core.validation import check_ranges
from thinwire.errors import ConfigError

FUSIBLE = (
    *("lr", "momentum", "weight_decay", "beta1", "beta2", "eps", "alpha", "rho", "lr_decay"),
    *("rank", "lora_alpha", "lora_dropout", "adapter_seed"),
)
"""The hyperparameters in which members of one array may differ."""

# Perturbed by their distance from 1: 0.9 and 0.99 average over 10 and 100 steps.
_DECAY_RATES = ("momentum", "beta1", "beta2", "alpha", "rho")


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
class Copy:
    """One event in which a member of a population was replaced by a copy of another.

    Args:
        step: optimizer steps before it.
        source: number of the trial that was copied.
        hyperparameters: all hyperparameters of the copy, perturbed ones included.
    """

    step: int
    source: int
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
        copies: in a population, the copies by which it came to its parameters, the earliest first.
    """

    trial: Trial
    loss: float
    metric: float
    steps: int
    stopped: bool = False
    copies: tuple[Copy, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "trial": self.trial.number,
            "loss": self.loss,
            "metric": self.metric,
            "steps": self.steps,
            "stopped": self.stopped,
            "hyperparameters": dict(self.trial.hyperparameters),
            "copies": [{**vars(each), "hyperparameters": dict(each.hyperparameters)} for each in self.copies],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Outcome:
        """Reverse `to_json`."""
        trial = Trial(fields["trial"], fields["hyperparameters"])
        copies = tuple(Copy(**each) for each in fields["copies"])
        return cls(trial, fields["loss"], fields["metric"], fields["steps"], fields["stopped"], copies)


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


@dataclass(frozen=True)
class Population:
    r"""Population based training: every `every` steps the worst members of an array become copies of the best.

    A copy takes the parameters, buffers, optimizer state and hyperparameters of one of the best `share` of members,
    drawn at random, and perturbs the hyperparameters in `perturbed`. A learning rate, weight decay or epsilon is
    multiplied by $1 \pm$ `change`; of a momentum or beta the distance from 1 is, which keeps it below 1.

    Random draws are keyed by the seed, the array and the step, so that no generator has to be saved.

    Jaderberg et al., Population Based Training of Neural Networks, 2017, arXiv:1711.09846, Algorithm 1 (exploit by
    truncation, explore by perturbation).

    Args:
        every: steps between selections; more lets differences between members show.
        share: fraction of the members that is replaced, in (0, 0.5], at least one member; more is greedier.
        change: relative size of a perturbation, in (0, 1).
        perturbed: names of the perturbed hyperparameters.

    Raises:
        ConfigError: a value out of its range, or a hyperparameter in which members of an array cannot differ.
    """

    every: int
    share: float = 0.25
    change: float = 0.2
    perturbed: tuple[str, ...] = ("lr",)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            every=("1..", "100 steps are usual"),
            share=("(0, 0.5]", "0.25 is usual"),
            change=("(0, 1)", "0.2 is usual"),
        )
        for name in self.perturbed:
            if name not in FUSIBLE:
                raise ConfigError(f"perturbed={name!r}: members of an array differ in {', '.join(FUSIBLE)} only")

    def sources(self, outcomes: Sequence[Outcome], rng: np.random.Generator) -> list[int]:
        """Return for each member, by slot, the slot whose state it continues from: its own, or one of the best."""
        slot_of = {each.trial.number: slot for slot, each in enumerate(outcomes)}
        order = [slot_of[each.trial.number] for each in ranked(outcomes)]
        # Half at most: a member cannot be both copied and replaced, and one member alone has nothing to copy.
        count = min(max(1, math.floor(self.share * len(order))), len(order) // 2)
        found = list(range(len(order)))
        for slot in order[len(order) - count :]:
            found[slot] = order[int(rng.integers(count))]
        return found

    def perturb(self, name: str, value: float, rng: np.random.Generator) -> float:
        """Return the value of a hyperparameter, changed up or down at random."""
        factor = 1 + self.change * (1 if rng.random() < 0.5 else -1)
        if name in _DECAY_RATES:
            return max(0.0, 1 - (1 - value) * factor)
        return value * factor


def rng_for(seed: int, array: int, step: int) -> np.random.Generator:
    """Return the random generator of one selection in a population, a function of its arguments.

    Args:
        seed: seed of the sweep.
        array: number of the array's first trial.
        step: step after which members are selected.
    """
    return np.random.default_rng(np.random.SeedSequence((seed, array, step)))
