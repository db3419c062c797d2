# SPDX-License-Identifier: Apache-2.0
"""Logistic regression on all the data, on coresets and on random points: tuned, run with several seeds, and timed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
import torch

from reproductions.craig.convex import Regression, choose
from reproductions.craig.incremental import (
    COARSE,
    METHODS,
    Arm,
    Course,
    Method,
    Trial,
    coresets_of,
    race,
    random_arms,
    redundant,
    seconds_per_gradient,
)
from thinwire.coreset.subset import Subset
from thinwire.lab.tasks import Task, load
from thinwire.lab.tasks.data.examples import ExampleSet

TARGET = 0.01
# Rates and decays are chosen with the first, sizes with all of them; none is judged.
APART = (1000, 1001, 1002)


@dataclass(frozen=True)
class Convex:
    """One convex problem at one redundancy; every arm is tuned over the same rates and decays.

    Args:
        task: whose data; labels are even or odd where there are more than two.
        copies: near-duplicates of each sample, itself among them.
        originals: at most so many samples.
        shares: sizes of subsets, of the originals where there are copies, else of all samples.
        methods: of descent.
        seeds: that are judged; each draws random points of its own, and is a round of the clock.
    """

    task: str
    copies: int
    originals: int
    methods: tuple[Method, ...] = METHODS
    shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    seeds: int = 3
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    decays: tuple[float, ...] = (0.01, 0.1, 1.0)

    @property
    def passes(self) -> int:
        """Gradients that a run takes, over the number of samples: enough for all the data to come to the target."""
        return {1: 60, 5: 16}.get(self.copies, 6)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of all samples."""
        return tuple(share / self.copies for share in self.shares) if self.copies > 1 else (0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Runs:
    """One arm by one method, at the rate and decay that were chosen for it.

    Args:
        rate: chosen with a seed apart.
        decay: chosen with it.
        apart: the runs with seeds apart, by which sizes are compared.
        courses: the judged runs, one for each seed.
    """

    rate: float
    decay: float
    apart: Sequence[Course]
    courses: Sequence[Course]

    def gradients(self) -> list[float]:
        """That each judged seed took to the target."""
        return [course.first(TARGET) for course in self.courses]

    @property
    def score(self) -> tuple[float, float]:
        """Of the seeds apart, less is better: the median gradients to the target, then the median least residual."""
        return (
            median(course.first(TARGET) for course in self.apart),
            median(min(course.residuals) for course in self.apart),
        )


@dataclass(frozen=True)
class Round:
    """One round of the clock, in which the arms take turns.

    Args:
        full: seconds of a gradient on all the data.
        coreset: seconds of a gradient on the best-sized coreset.
        selection: seconds of choosing that coreset.
    """

    full: float
    coreset: float
    selection: float


@dataclass(frozen=True)
class Found:
    """What came of one convex problem.

    Args:
        floors: by arm, the residuals of its own optimum, one for each drawing.
        spent: by coreset, the seconds of its first selection.
        runs: by method and arm.
        rounds: of the clock, one for each judged seed; of incremental gradient.
    """

    floors: Mapping[str, Sequence[float]]
    spent: Mapping[str, float]
    runs: Mapping[str, Mapping[str, Runs]]
    rounds: Sequence[Round]

    def best(self, method: str, kind: str) -> str:
        """The arm of a kind, of whatever size, that takes the fewest gradients with the seeds apart."""
        arms = [arm for arm in self.runs[method] if arm.rpartition(" ")[0] == kind]
        return min(arms, key=lambda arm: self.runs[method][arm].score)

    def fewer(self, method: str, kind: str = "craig") -> list[float]:
        """By seed, all the data's gradients over those of the best-sized subset of a kind; see `_times`."""
        return _times(self.runs[method]["full"], self.runs[method][self.best(method, kind)])

    def beside_random(self, method: str) -> list[float]:
        """By seed, the gradients of the better of both kinds of random points over the coreset's."""
        ours = self.runs[method][self.best(method, "craig")]
        kinds = [self.runs[method][self.best(method, kind)] for kind in ("random", "weighted random")]
        return [min(pair) for pair in zip(*(_times(each, ours) for each in kinds), strict=True)]

    def sooner(self) -> list[float]:
        """By seed and round, all the data's seconds by incremental gradient over the coreset's, selection included."""
        ours = self.runs["ig"][self.best("ig", "craig")].gradients()
        full = [_or_all(course) for course in self.runs["ig"]["full"].courses]
        return [
            0.0 if math.isinf(a) else b * clock.full / (clock.selection + a * clock.coreset)
            for a, b, clock in zip(ours, full, self.rounds, strict=True)
        ]

    def arrives(self, method: str) -> bool:
        """Whether most seeds come to the target with all the data; else there is nothing to compare with."""
        return math.isfinite(median(self.runs[method]["full"].gradients()))


def _times(others: Runs, ours: Runs) -> list[float]:
    """Others' gradients to the target over ours, by seed; 0 where ours are never there.

    Where the others are never there, all their gradients count, and the figure is a lower bound.
    """
    pairs = zip(others.courses, ours.gradients(), strict=True)
    return [0.0 if math.isinf(count) else _or_all(course) / count for course, count in pairs]


def _or_all(course: Course) -> float:
    return min(course.first(TARGET), float(course.evaluations[-1]))


def measure_convex(plan: Convex) -> Found:
    """Tune every arm by every method, run it with the judged seeds, and time the best coreset beside all the data."""
    problem = redundant(regression_of(load(plan.task)), plan.copies, plan.originals)
    fixed = coresets_of(problem, plan.fractions)
    judged = range(plan.seeds)
    arms = {seed: [*fixed, *random_arms(problem, plan.fractions, seed)] for seed in (*APART, *judged)}
    floors = {arm.name: [_floor(problem, arm)] for arm in fixed[1:]}
    for seed in judged:
        for arm in arms[seed][len(fixed) :]:
            floors.setdefault(arm.name, []).append(_floor(problem, arm))
    runs = {method: _tuned(problem, arms, method, plan) for method in plan.methods}
    spent = {arm.name: arm.seconds for arm in fixed[1:]}
    found = Found(floors, spent, runs, ())
    best = next(place for place, arm in enumerate(fixed) if arm.name == found.best("ig", "craig"))
    rounds = [_round(problem, fixed[0], fixed[best], plan.fractions[best - 1]) for _ in judged]
    return Found(floors, spent, runs, rounds)


def _round(problem: Regression, full: Arm, coreset: Arm, fraction: float) -> Round:
    return Round(
        seconds_per_gradient(problem, full),
        seconds_per_gradient(problem, coreset),
        choose(problem, fraction)[1],
    )


def _tuned(problem: Regression, arms: Mapping[int, Sequence[Arm]], method: Method, plan: Convex) -> dict[str, Runs]:
    """Choose for each arm the rate and decay that are first at the target, or else nearest, with the first seed apart.

    Then run that choice with all other seeds.
    """
    most = round(plan.passes * problem.n)
    grid = list(product(plan.rates, plan.decays))
    trials = [Trial(arm, rate, decay, APART[0]) for arm in arms[APART[0]] for rate, decay in grid]
    tried = race(problem, method, trials, most, target=TARGET, together=True, spacing=COARSE)
    best: dict[str, tuple[tuple[float, float], Trial, Course]] = {}
    for trial, course in zip(trials, tried, strict=True):
        score = (course.first(TARGET), min(course.residuals))
        if trial.arm.name not in best or score < best[trial.arm.name][0]:
            best[trial.arm.name] = (score, trial, course)
    seeds = [seed for seed in arms if seed != APART[0]]
    chosen = [Trial(arm, best[arm.name][1].rate, best[arm.name][1].decay, seed) for seed in seeds for arm in arms[seed]]
    courses = race(problem, method, chosen, most, target=TARGET)
    apart: dict[str, list[Course]] = {name: [course] for name, (_, _, course) in best.items()}
    judged: dict[str, list[Course]] = {name: [] for name in best}
    for trial, course in zip(chosen, courses, strict=True):
        (apart if trial.seed in APART else judged)[trial.arm.name].append(course)
    return {name: Runs(t.rate, t.decay, apart[name], judged[name]) for name, (_, t, _) in best.items()}


def _floor(problem: Regression, arm: Arm) -> float:
    """The residual at the optimum of the subset itself: training on it comes no nearer."""
    return problem.residual(
        problem.solved(Subset(arm.indices, arm.weights.double() * problem.n / len(arm.indices), problem.n))
    )


def regression_of(task: Task) -> Regression:
    """A task's training data as a binary problem: its two classes, or even and odd ones."""
    data = task.data
    assert isinstance(data, ExampleSet)
    pieces = [data.train.take(rows) for rows in np.array_split(np.arange(len(data.train)), 16)]
    x, y = (torch.cat([piece[k] for piece in pieces]) for k in (0, 1))
    return Regression(task.title, x.flatten(1).float(), y % 2)
