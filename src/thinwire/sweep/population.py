"""Population based training: the worst go on from the best, with other hyperparameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from thinwire.errors import ConfigError
from thinwire.sweep.trials import FUSIBLE, Outcome, ranked

# What they say is how fast the past is forgotten: their distance from one.
_MEMORIES = ("momentum", "beta1", "beta2")


@dataclass(frozen=True)
class Population:
    r"""Every so often the worst members of an array become copies of the best, and change their hyperparameters.

    A copy takes over parameters, buffers, the optimizer's state and all hyperparameters of one of the best `share` of
    members, drawn by chance, and moves each of those in `perturbed`: a learning rate, weight decay or epsilon is
    multiplied by $1 \pm$ `change`, and of a momentum or beta its distance from 1 is, which keeps it below 1.

    Draws are keyed by the seed, the array and the step, so that nothing about chance has to be saved.

    Jaderberg et al., Population Based Training of Neural Networks, 2017, arXiv:1711.09846, Algorithm 1 (exploit by
    truncation, explore by perturbation).

    Args:
        every: steps between such exchanges; more lets differences show.
        share: of the members that are replaced, in (0, 0.5], and at least one; more is greedier.
        change: how far hyperparameters are moved, in (0, 1).
        perturbed: which of them.

    Raises:
        ConfigError: a value out of its range, or a hyperparameter in which members of an array cannot differ.
    """

    every: int
    share: float = 0.25
    change: float = 0.2
    perturbed: tuple[str, ...] = ("lr",)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every={self.every}: must be at least 1 step")
        if not 0 < self.share <= 0.5:
            raise ConfigError(f"share={self.share}: must lie in (0, 0.5]; 0.25 is usual")
        if not 0 < self.change < 1:
            raise ConfigError(f"change={self.change}: must lie between 0 and 1; 0.2 is usual")
        for name in self.perturbed:
            if name not in FUSIBLE:
                raise ConfigError(f"perturbed={name!r}: members of an array differ in {', '.join(FUSIBLE)} only")

    def sources(self, outcomes: Sequence[Outcome], draws: np.random.Generator) -> list[int]:
        """For each member, by place, the place of whom it goes on from: itself, or one of the best."""
        place_of = {each.trial.number: place for place, each in enumerate(outcomes)}
        order = [place_of[each.trial.number] for each in ranked(outcomes)]
        count = min(max(1, math.floor(self.share * len(order))), len(order) // 2)
        found = list(range(len(order)))
        for place in order[len(order) - count :]:
            found[place] = order[int(draws.integers(count))]
        return found

    def moved(self, name: str, value: float, draws: np.random.Generator) -> float:
        """A hyperparameter, a step up or down."""
        factor = 1 + self.change * (1 if draws.random() < 0.5 else -1)
        if name in _MEMORIES:
            return max(0.0, 1 - (1 - value) * factor)
        return value * factor


def draws_of(seed: int, array: int, step: int) -> np.random.Generator:
    """The draws of one exchange: the same whenever they are asked for.

    Args:
        seed: of the sweep.
        array: the number of its first trial.
        step: after which members are exchanged.
    """
    return np.random.default_rng(np.random.SeedSequence((seed, array, step)))
