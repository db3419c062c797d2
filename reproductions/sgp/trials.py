# SPDX-License-Identifier: Apache-2.0
"""Short runs on threads: each method's learning rate for the race, and its results where workers' data differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reproductions.shared.curves import Choice
from reproductions.shared.threads import Data, Schedule, train_on_threads, trained
from thinwire import parse
from thinwire.lab.runs import Settings
from thinwire.lab.runs.optimizer import make_optimizer
from thinwire.lab.tasks import Evaluation, load

UNLIKE, UNLIKE_WORKERS = "dirichlet(0.1)", 8
_STEPS, _BATCH_SIZE = 120, 16


@dataclass(frozen=True)
class Unlike:
    """What came of one method where workers' data differ.

    Args:
        choice: its learning rate.
        accuracies: on held-out data, with each seed.
    """

    choice: Choice
    accuracies: Sequence[float]


def race_loss(settings: Settings, recipe: str) -> float:
    """The held-out loss of the consensus after a run on threads, with all of a real run's settings but its link."""
    data = Data(
        settings.workers,
        settings.split,
        settings.seed,
        settings.steps or 0,
        settings.batch_size,
        settings.eval_limit,
    )
    return trained(
        load(settings.task),
        parse(recipe),
        data,
        optimizer=lambda model: make_optimizer(model, settings),
        rate=settings.lr_at,
        size=settings.model,
    ).loss


def unlike(recipe: str, rates: Sequence[float], tuning_seeds: Sequence[int], seeds: Sequence[int]) -> Unlike:
    """Train with each seed at the rate that has the lowest loss with other seeds."""
    choice = Choice(
        {rate: _mean([_ended(recipe, rate, seed).loss for seed in tuning_seeds]) for rate in rates},
    )
    return Unlike(choice, [_ended(recipe, choice.rate, seed).metric for seed in seeds])


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _ended(recipe: str, lr: float, seed: int) -> Evaluation:
    schedule = Schedule(_STEPS, _BATCH_SIZE, lr, momentum=0.9)
    return train_on_threads(load("digits"), parse(recipe), schedule, workers=UNLIKE_WORKERS, split=UNLIKE, seed=seed)
