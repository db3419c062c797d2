"""Weighted coresets against random points and all the data, by the clock and by points seen."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from reproductions.craig import pictures as plots
from reproductions.craig.convex import METHODS, Course, Method, Regression, choose, descend
from reproductions.craig.deep import DeepCourse, Recipe, train_network, two_layers
from reproductions.shared.claims import Attempt, Claim, Result
from thinwire.coreset.baselines import Random
from thinwire.coreset.craig import Craig
from thinwire.coreset.policy import Policy
from thinwire.coreset.subset import Subset
from thinwire.tasks import Task, load
from thinwire.tasks.data.examples import ExampleSet

_TARGET = 0.01
_SPEEDUP = 3.0


@dataclass(frozen=True)
class Convex:
    """The grid of one convex problem; every arm is tuned over the same rates."""

    task: str
    fractions: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int
    passes: float
    batch_size: int = 16


@dataclass(frozen=True)
class Deep:
    """The grid of one network; every arm is tuned over the same rates."""

    task: str
    model: str | None
    arms: tuple[tuple[str, Policy | None], ...]
    rates: tuple[float, ...]
    points: int
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 1e-4


@dataclass(frozen=True)
class Outcome:
    """What came of one convex problem: by arm the subset's floor, by method and arm the best course of each seed."""

    floors: dict[str, float]
    spent: dict[str, float]
    courses: dict[str, dict[str, list[Course]]]

    def seconds(self, method: str, arm: str) -> list[float]:
        """When each seed's best run reached the target."""
        return [course.seconds_to(_TARGET) for course in self.courses[method][arm]]

    def speedups(self, method: str, fraction: str) -> list[float]:
        """Full data's seconds over the coreset's, for each seed; 0 where the coreset never got there.

        Where all the data did not get there within its passes, all its seconds count, and the figure is a lower bound.
        """
        whole = [min(course.seconds_to(_TARGET), course.seconds[-1]) for course in self.courses[method]["full"]]
        pairs = zip(whole, self.seconds(method, f"craig {fraction}"), strict=True)
        return [0.0 if math.isinf(ours) else full / ours for full, ours in pairs]

    def beats_random(self, method: str, fraction: str) -> bool:
        """Whether the coreset got there, and before a random subset of its size."""
        ours, random = (median(self.seconds(method, f"{kind} {fraction}")) for kind in ("craig", "random"))
        return ours < random


def _plans(quick: bool, real: set[str]) -> tuple[list[Convex], list[Deep]]:
    """What is measured: all of it, or what three minutes bear; where files are missing, on digits."""
    arms = _arms((0.1, 0.4) if quick else (0.1, 0.2, 0.4), every=5)
    if not real:
        convex = [Convex("digits", (0.1, 0.3, 0.5), (0.03, 0.1, 0.3), 1 if quick else 3, 40.0)]
        return convex, [Deep("digits", None, arms, (0.1, 0.5), 30_000 if quick else 100_000)]
    if quick:
        convex = [Convex("a9a", (0.1, 0.3, 0.5), (0.1, 0.3), 1, 3.0)]
        return convex, [Deep("mnist", None, arms, (0.1, 0.5), 80_000)]
    convex = [
        Convex("a9a", (0.05, 0.1, 0.2, 0.3, 0.5), (0.1, 0.3), 2, 5.0),
        Convex("mnist", (0.1, 0.3, 0.5), (0.003, 0.01), 1, 4.0),
    ]
    deep = [
        Deep("mnist", None, arms, (0.1, 0.5), 300_000),
        Deep("cifar10", "resnet8", _arms((0.1,), every=5), (0.1,), 60_000, 64, momentum=0.9, weight_decay=5e-4),
    ]
    return convex, deep


def _arms(fractions: tuple[float, ...], *, every: int) -> tuple[tuple[str, Policy | None], ...]:
    arms: list[tuple[str, Policy | None]] = [("full", None)]
    for fraction in fractions:
        arms.append((f"craig {_percent(fraction)}", Craig(fraction, every=every, method="sparse")))
        arms.append((f"random {_percent(fraction)}", Random(fraction, every=every)))
    smallest = fractions[0]
    return (*arms, (f"strata {_percent(smallest)}", Craig(smallest, every=every, mode="strata", method="sparse")))


def measure(attempt: Attempt) -> Result:
    """Train every arm at every rate, draw the curves, and judge."""
    convex, deep = _plans(attempt.quick, _present())
    details: dict[str, Any] = {} if _present() else {"data": "no THINWIRE_DATA: scikit-learn's digits instead"}
    outcomes: dict[str, Outcome] = {}
    for place, plan in enumerate(convex):
        attempt.begin(f"logistic regression on {plan.task}", place)
        outcomes[plan.task] = _convex(plan)
        details |= _convex_details(plan, outcomes[plan.task])
        if plots.available():
            _draw_convex(attempt, plan, outcomes[plan.task])
    for place, network in enumerate(deep, len(convex)):
        attempt.begin(f"network on {network.task}", place)
        courses = _deep(network)
        details |= _deep_details(network, courses)
        if plots.available():
            plots.draw_accuracies(attempt.folder / f"{network.task}-accuracy.png", network.task, courses)
    return judge(convex, outcomes, details)


def judge(plans: list[Convex], outcomes: dict[str, Outcome], details: dict[str, Any]) -> Result:
    """The greatest speed-up of a coreset that beats random points of its size, and whether it is great enough."""
    found = [
        (outcomes[plan.task].speedups(method, _percent(fraction)), plan.task, method, _percent(fraction))
        for plan in plans
        for method in METHODS
        for fraction in plan.fractions
        if outcomes[plan.task].beats_random(method, _percent(fraction))
    ]
    if not found:
        words = f"no coreset reached {_TARGET:g} of the gap before a random subset of its size"
        return Result(False, words, 0.0, 0.0, 0.0, details)
    ratios, task, method, size = max(found, key=lambda each: median(each[0]))
    value = median(ratios)
    words = f"{value:.3g} times (best: {method.upper()} on {task}, {size} of the points), selection included"
    return Result(value >= _SPEEDUP, words, value, min(ratios), max(ratios), details)


# -- convex ------------------------------------------------------------------------------------------------------------


def _convex(plan: Convex) -> Outcome:
    problem = _regression(load(plan.task))
    subsets = {"full": (Subset.whole(problem.n), 0.0)}
    for fraction in plan.fractions:
        subsets[f"craig {_percent(fraction)}"] = choose(problem, fraction, "craig", 0)
        subsets[f"random {_percent(fraction)}"] = choose(problem, fraction, "random", 0)
    floors = {arm: problem.residual(problem.solved(subset)) for arm, (subset, _) in subsets.items() if arm != "full"}
    courses = {
        method: {arm: _tuned(problem, subset, method, plan, spent) for arm, (subset, spent) in subsets.items()}
        for method in METHODS
    }
    return Outcome(floors, {arm: spent for arm, (_, spent) in subsets.items()}, courses)


def _tuned(problem: Regression, subset: Subset, method: Method, plan: Convex, spent: float) -> list[Course]:
    """For each seed the course of the rate that reaches the target first, or else comes nearest."""
    run = partial(
        descend, problem, subset, method, batch_size=plan.batch_size, passes=plan.passes, spent=spent, target=_TARGET
    )
    best: list[Course] = []
    for seed in range(plan.seeds):
        courses = [run(lr=lr, seed=seed) for lr in plan.rates]
        best.append(min(courses, key=lambda course: (course.seconds_to(_TARGET), min(course.residuals))))
    return best


def _regression(task: Task) -> Regression:
    data = task.data
    assert isinstance(data, ExampleSet)
    pieces = [data.train.take(rows) for rows in np.array_split(np.arange(len(data.train)), 16)]
    x = torch.cat([piece[0].flatten(1) for piece in pieces])
    return Regression(task.title, x, torch.cat([piece[1] for piece in pieces]))


def _convex_details(plan: Convex, outcome: Outcome) -> dict[str, Any]:
    near = [_percent(f) for f in plan.fractions if outcome.floors[f"craig {_percent(f)}"] <= _TARGET]
    rows: dict[str, Any] = {
        f"{plan.task}: smallest coreset whose own optimum is within {_TARGET:g}": near[0] if near else "none of these"
    }
    for arm, floor in outcome.floors.items():
        spent = f", chosen in {outcome.spent[arm]:.3g} s" if arm.startswith("craig") else ""
        rows[f"{plan.task}, {arm}: optimum of the subset"] = f"{floor:.3g} of the gap above that of all the data{spent}"
    for method in METHODS:
        for arm in ("full", *outcome.floors):
            words = plots.in_words(median(outcome.seconds(method, arm)))
            least = median(min(course.residuals) for course in outcome.courses[method][arm])
            rows[f"{plan.task}, {method.upper()}, {arm}: seconds to {_TARGET:g}"] = (
                f"{words}; least residual {least:.3g}"
            )
    return rows


def _draw_convex(attempt: Attempt, plan: Convex, outcome: Outcome) -> None:
    first = {method: {arm: each[0] for arm, each in arms.items()} for method, arms in outcome.courses.items()}
    plots.draw_residuals(attempt.folder / f"{plan.task}-residual.png", plan.task, first, _TARGET)
    floors = {kind: [outcome.floors[f"{kind} {_percent(f)}"] for f in plan.fractions] for kind in ("craig", "random")}
    plots.draw_floors(attempt.folder / f"{plan.task}-floors.png", plan.task, plan.fractions, floors)


# -- deep --------------------------------------------------------------------------------------------------------------


def _deep(plan: Deep) -> dict[str, DeepCourse]:
    """For each arm the course of the rate that ends best."""
    task = load(plan.task)
    features = {"mnist": 784, "digits": 64}.get(plan.task, 0)
    network = partial(two_layers, features, 10) if plan.model is None else partial(task.model, plan.model, seed=0)
    recipe = Recipe(plan.task, task, network, plan.batch_size, plan.momentum, plan.weight_decay)
    best: dict[str, DeepCourse] = {}
    for arm, policy in plan.arms:
        courses = [train_network(recipe, policy, lr=lr, points=plan.points) for lr in plan.rates]
        best[arm] = max(courses, key=lambda course: course.accuracies[-1])
    return best


def _deep_details(plan: Deep, courses: dict[str, DeepCourse]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    wanted = courses["full"].accuracies[-1] - 0.01
    for arm, course in courses.items():
        seconds, points = course.first(wanted, course.seconds), course.first(wanted, course.points)
        there = f"{plots.in_words(seconds)}, {points:.3g} points" if math.isfinite(seconds) else "never"
        rows[f"{plan.task} network, {arm}"] = (
            f"{course.accuracies[-1]:.4f} after {course.seconds[-1]:.3g} s and {course.points[-1]:,} points, "
            f"{course.selection_seconds:.3g} s of it choosing; to {wanted:.4f}: {there}"
        )
    return rows


def _present() -> set[str]:
    """The tasks of this claim whose files are here."""
    return {"a9a", "mnist", "cifar10"} if os.environ.get("THINWIRE_DATA") else set()


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g}%"


CLAIM = Claim(
    name="craig",
    sentence="Trained on a weighted coreset of its data, an incremental gradient method comes as near to the optimum "
    "several times sooner, the selection included.",
    paper="Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, "
    "ICML 2020, arXiv:1906.01827",
    published="up to 6 times for logistic regression, up to 3 times for networks",
    rule=f"logistic regression: at least {_SPEEDUP:g} times less time to a loss within {_TARGET:g} of the gap between "
    "start and optimum, and less than a random subset of the same size takes, each arm at its best of the same rates",
    run=measure,
)
