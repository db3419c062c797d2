"""Population based training: the worst go on from the best, with other hyperparameters."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from laconic.errors import ConfigError
from laconic.sweep.training import Plan, Together
from laconic.sweep.trials import Outcome, Trial, ranked


@dataclass(frozen=True)
class Population:
    r"""Every so often the worst members of an array become copies of the best, and change their hyperparameters.

    A copy takes over parameters, buffers and the optimizer's state of one of the best `share` of members, drawn by
    chance, and multiplies each of its hyperparameters in `perturbed` by $1 \pm$ `change`.

    Jaderberg et al., Population Based Training of Neural Networks, 2017, arXiv:1711.09846, Algorithm 1 (exploit by
    truncation, explore by perturbation).

    Args:
        every: steps between such exchanges; more lets differences show.
        share: of the members that are replaced, in (0, 0.5]; more is greedier.
        change: how far hyperparameters are moved, in (0, 1).
        perturbed: which of them.

    Raises:
        ConfigError: a value out of its range.
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

    def sources(self, outcomes: list[Outcome], generator: torch.Generator) -> list[int]:
        """For each member, by place, the place of whom it goes on from: itself, or one of the best."""
        order = [outcomes.index(each) for each in ranked(outcomes)]
        count = math.floor(self.share * len(order))
        found = list(range(len(order)))
        for place in order[len(order) - count :]:
            found[place] = order[int(torch.randint(count, (), generator=generator))]
        return found

    def exchange(self, run: Together, generator: torch.Generator) -> list[int]:
        """Judge, copy and perturb; returns whom each member goes on from."""
        sources = self.sources(run.outcomes(), generator)
        own = list(run.live)
        run.keep(sources)
        run.live = own
        for place in [place for place, source in enumerate(sources) if source != place]:
            for name in self.perturbed:
                sign = 1 if bool(torch.rand((), generator=generator) < 0.5) else -1
                vector = run.rates if name == "lr" else run.optimizer.param_groups[0][name]
                vector[place] *= 1 + sign * self.change
        return sources


def train_population(plan: Plan, trials: list[Trial], population: Population) -> list[Outcome]:
    """Train trials as one population; returns one outcome per member, in their order.

    Trials say what members begin with; what they end with is in their outcomes' knobs.

    Raises:
        ConfigError: trials differ in what cannot be fused, or halving is asked for as well.
    """
    if plan.halving is not None:
        raise ConfigError(f"halving={plan.halving} with a population: members are copied over, not given up; keep one")
    run = Together(plan, trials)
    missing = [name for name in population.perturbed if name not in run.optimizer.param_groups[0]]
    if missing:
        raise ConfigError(f"perturbed={missing[0]!r}: {type(run.optimizer).__name__} has no such hyperparameter")
    generator = torch.Generator().manual_seed(plan.seed)
    while run.step < plan.steps:
        run.advance()
        if run.step % population.every == 0 and run.step < plan.steps:
            population.exchange(run, generator)
    for place, trial in enumerate(run.live):
        now = {name: run.optimizer.hyperparameters(place)[name] for name in population.perturbed}
        run.live[place] = Trial(trial.number, {**trial.knobs, **now, "lr": float(run.rates[place])})
    return run.outcomes()
