# SPDX-License-Identifier: Apache-2.0
"""Those that race, and the figures of the rule."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

BUDGET, EVALUATED_EVERY, AVERAGED, MOST = 240, 10, 3, 2
TUNING_STEPS, TUNING_EVALUATED_EVERY = 96, 24
AVERAGED_STEPS = 30
PAIRED_ROUNDS = 16
TUNING_SEED, SEEDS = 100, (0, 1, 2)
OUTER_RATES = (0.4, 0.7, 1.0)
WARM_STEPS, FEWEST_STEPS = 5, 30
FEW_WARM_STEPS, FEW_STEPS, FEW_BLOCK = 2, 8, 2
LINKS = ("100mbit", "20mbit", "1gbit", "none", "100mbit+50ms")
# Curves, and so seconds to the target, are of the first number of workers; with the other one only steps are timed.
SIZES = (4, 8)


@dataclass(frozen=True)
class Work:
    """What is trained.

    Args:
        model: of the task.
        optimizer: of all racers that do not name their own.
        batch_size: of a worker and step.
        eval_limit: held-out examples of an evaluation.
        bytes: of the parameters in fp32.
        rates: tried for every racer, as multiples of the task's rate for that optimizer, whatever the racer's own is.
        places: links and numbers of workers.
        seeds: of those that are judged.
    """

    model: str
    optimizer: str
    batch_size: int
    eval_limit: int
    bytes: float
    rates: tuple[float, ...]
    places: tuple[tuple[str, int], ...]
    seeds: tuple[int, ...]


WORKS = {
    # The task's rate is for models of a sixth of this size or less; this one learns faster at a third of it, 1e-3.
    "text": Work(
        "6m",
        "adamw",
        2,
        64,
        25.92e6,
        (0.15, 0.3, 0.6),
        tuple((link, size) for size in SIZES for link in LINKS),
        SEEDS,
    ),
    "cifar10": Work("resnet20", "sgd", 64, 1024, 1.09e6, (0.5, 1.0, 2.0), (("100mbit", 4),), SEEDS[:1]),
}
"""By task; all figures of a race are among racers of one task."""
PLACES = tuple((task, *place) for task, work in WORKS.items() for place in work.places)
"""Where it is raced: task, link, workers."""


@dataclass(frozen=True)
class Racer:
    """One of those that race.

    Args:
        name: in tables and file names.
        recipe: with {outer} where an outer optimizer's rate goes.
        whose: "thinwire", "torch", or the library that it comes from.
        task: that it trains on.
        optimizer: if not that of the work.
        inner: of a racer with an outer rate, whose inner rate it takes.
        rates_of: the racer whose rates it takes.
        same_as: the racer whose rates and curves it takes, because it computes the same.
        headline: raced first, everywhere and with all seeds; others on one link with 4 workers and one seed.
        link: where those race that are not in the headline.
        library: that has an environment of its own, if it is not torch or thinwire.
        period: steps after which its communication repeats.
        dense: it sends all gradients, or a cast of them, at every step.
        dense_steps: it begins with so many steps that send all gradients, and take as long as those of `dense_as`.
        dense_as: another racer.
        timed: the recipe whose later steps are timed, if that begins with fewer of them.
    """

    name: str
    recipe: str
    whose: str = "thinwire"
    task: str = "text"
    optimizer: str | None = None
    inner: str | None = None
    rates_of: str | None = None
    same_as: str | None = None
    headline: bool = True
    link: str = LINKS[0]
    library: str | None = None
    period: int = 8
    dense: bool = False
    dense_steps: int = 0
    dense_as: str | None = None
    timed: str | None = None

    @property
    def work(self) -> Work:
        """What it trains."""
        return WORKS[self.task]

    @property
    def curve_of(self) -> Racer:
        """The racer whose curves are its own."""
        return self if self.same_as is None else named(self.same_as)

    @property
    def tuned_as(self) -> Racer:
        """The racer whose rates are its own."""
        own = self.curve_of
        return own if own.rates_of is None else named(own.rates_of)

    @property
    def outer(self) -> bool:
        """Whether it has an outer rate."""
        return "{outer}" in self.recipe

    @property
    def seeds(self) -> Sequence[int]:
        """Those that it races with."""
        return self.work.seeds if self.headline else SEEDS[:1]

    def races_at(self, link: str, workers: int) -> bool:
        """Whether it races there."""
        return self.headline or (link, workers) == (self.link, SIZES[0])


OUTER = "OuterOptimizer('SGD', lr={outer}, momentum=0.9, nesterov=True)"
LOCALS = {"text": Racer("Local", "Local()"), "cifar10": Racer("resnet-Local", "Local()", task="cifar10")}
"""By task, the step without communication."""
LATER_LOCAL = Racer("Local-later", "Local()", headline=False)
"""The same on a link in the hour of those that are not in the headline."""
RACERS = tuple(
    Racer(**each)
    for each in tomllib.loads(Path(__file__).with_name("racers.toml").read_text(encoding="utf-8"))["racer"]
)
"""In the order in which they are run."""


def named(name: str) -> Racer:
    """The racer of that name."""
    return next(racer for racer in (*LOCALS.values(), LATER_LOCAL, *RACERS) if racer.name == name)


def of_task(task: str) -> list[Racer]:
    """Those that train on it."""
    return [racer for racer in RACERS if racer.task == task]


def ddp_of(task: str) -> Racer:
    """The one whose losses are the target."""
    return of_task(task)[0]
