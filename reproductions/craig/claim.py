# SPDX-License-Identifier: Apache-2.0
"""Weighted coresets against random points and all the data, by gradients of single samples and by the clock."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch

from reproductions.craig import pictures as plots
from reproductions.craig.convex import Regression
from reproductions.craig.deep import DeepCourse, Recipe, train_network, two_layers
from reproductions.craig.incremental import (
    KINDS,
    METHODS,
    NOISE,
    Arm,
    Course,
    Method,
    Trial,
    arms_of,
    race,
    redundant,
    seconds_per_gradient,
)
from reproductions.shared.claims import Attempt, Claim, Earlier, Outcome, Result, judged
from thinwire.coreset.baselines import Random
from thinwire.coreset.craig import Craig
from thinwire.coreset.policy import Policy
from thinwire.coreset.subset import Subset
from thinwire.tasks import Task, load
from thinwire.tasks.data.examples import ExampleSet

TARGET = 0.01
SPEEDUP, NETWORK_SPEEDUP = 3.0, 2.0
POINTS = 0.01
REDUNDANT = 20


@dataclass(frozen=True)
class Convex:
    """One convex problem at one redundancy; every arm is tuned over the same rates and decays.

    Args:
        task: whose data; labels are even or odd where there are more than two.
        copies: near-duplicates of each sample, itself among them.
        originals: at most so many samples.
        shares: sizes of subsets, of the originals where there are copies, else of all samples.
        methods: of descent.
        seeds: with which the best trial of each arm is run; one more tunes.
    """

    task: str
    copies: int
    originals: int
    methods: tuple[Method, ...] = METHODS
    shares: tuple[float, ...] = (0.25, 0.5, 1.0)
    seeds: int = 3
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
    decays: tuple[float, ...] = (0.1, 1.0)

    @property
    def passes(self) -> int:
        """Gradients that a run takes, over the number of samples: enough for all the data to come to the target."""
        return {1: 60, 5: 16}.get(self.copies, 6)

    @property
    def fractions(self) -> tuple[float, ...]:
        """Of all samples."""
        return tuple(share / self.copies for share in self.shares) if self.copies > 1 else (0.1, 0.3, 0.5)


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
class Found:
    """What came of one convex problem.

    Attributes:
        floors: by arm, the residual of its own optimum.
        spent: by arm, the seconds of its selection.
        per_gradient: the seconds of a step of one sample.
        courses: by method and arm, the runs of its best trial, one for each seed.
    """

    floors: Mapping[str, float]
    spent: Mapping[str, float]
    per_gradient: float
    courses: Mapping[str, Mapping[str, Sequence[Course]]]

    def gradients(self, method: str, arm: str) -> list[float]:
        """That each seed took to the target."""
        return [course.first(TARGET) for course in self.courses[method][arm]]

    def seconds(self, method: str, arm: str) -> list[float]:
        """That each seed took to the target, selection included."""
        return [self.spent[arm] + count * self.per_gradient for count in self.gradients(method, arm)]

    def best(self, method: str, kind: str) -> str:
        """The arm of a kind, of whatever size, that takes the fewest gradients in the median of seeds."""
        arms = [arm for arm in self.courses[method] if arm.rpartition(" ")[0] == kind]
        return min(arms, key=lambda arm: (median(self.gradients(method, arm)), self._least(method, arm)))

    def _least(self, method: str, arm: str) -> float:
        return median(min(course.residuals) for course in self.courses[method][arm])


def _plans(quick: bool, real: set[str]) -> tuple[list[Convex], list[Deep]]:
    """What is measured: all of it, or what three minutes bear; where files are missing, on digits."""
    every = 1
    if not real:
        methods: tuple[Method, ...] = ("ig",) if quick else METHODS
        convex = [
            Convex("digits", copies, 1000, methods) for copies in ((1, REDUNDANT) if quick else (1, 5, REDUNDANT))
        ]
        return convex, [Deep("digits", None, _arms((0.1, 0.4), every=every), (0.1, 0.5), 30_000 if quick else 100_000)]
    if quick:
        plans = [Convex(task, copies, 600, ("ig",)) for task in ("digits", "a9a") for copies in (1, REDUNDANT)]
        return plans, [Deep("mnist", None, _arms((0.1,), every=every), (0.1, 0.5), 60_000)]
    convex = [Convex(task, copies, 1000) for task in ("digits", "mnist", "a9a") for copies in (1, 5, REDUNDANT)]
    deep = [
        Deep("mnist", None, _arms((0.1, 0.2, 0.4), every=every), (0.1, 0.5), 300_000),
        Deep("cifar10", "resnet8", _arms((0.1,), every=every), (0.1,), 60_000, 64, momentum=0.9, weight_decay=5e-4),
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
    found: dict[tuple[str, int], Found] = {}
    for place, plan in enumerate(convex):
        attempt.begin(f"logistic regression on {plan.task}, {plan.copies} near-duplicates", place)
        found[plan.task, plan.copies] = _convex(plan)
        details |= _convex_details(plan, found[plan.task, plan.copies])
        if plots.available():
            _draw_convex(attempt, plan, found[plan.task, plan.copies])
    networks: dict[str, Mapping[str, DeepCourse]] = {}
    for place, network in enumerate(deep, len(convex)):
        attempt.begin(f"network on {network.task}", place)
        networks[network.task] = _deep(network)
        details |= _deep_details(network, networks[network.task])
        if plots.available():
            plots.draw_accuracies(attempt.folder / f"{network.task}-accuracy.png", network.task, networks[network.task])
    return judge(found, networks, details)


def judge(
    found: Mapping[tuple[str, int], Found], networks: Mapping[str, Mapping[str, DeepCourse]], details: dict[str, Any]
) -> Result:
    """By incremental gradient, whether coresets need fewer gradients and less time, and less than random points do."""
    copied = {task: each for (task, copies), each in found.items() if copies == REDUNDANT}
    single = {task: each for (task, copies), each in found.items() if copies == 1}
    fewer = {task: _speedup(each, "gradients") for task, each in copied.items()}
    sooner = {task: _speedup(each, "seconds") for task, each in copied.items()}
    worst = min(fewer, key=lambda task: median(fewer[task]))
    reached = {name: all(map(_full_arrives, each.values())) for name, each in (("copied", copied), ("single", single))}

    def met(holds: bool, data: str = "copied") -> Outcome:
        return judged(holds) if reached[data] else Outcome.UNDECIDED

    deep = [_network_speedup(courses) for courses in networks.values()]
    parts = {
        "redundant data, gradients": met(all(median(each) >= SPEEDUP for each in fewer.values())),
        "redundant data, seconds": met(all(median(each) >= SPEEDUP for each in sooner.values())),
        "redundant data, beside random": met(all(map(_beats_random, copied.values()))),
        "data as they are, gradients": met(
            all(median(_speedup(each, "gradients")) >= SPEEDUP for each in single.values()), "single"
        ),
        "networks": judged(all(each >= NETWORK_SPEEDUP for each in deep)),
    }
    told = ", ".join(
        f"{task} {median(each):.2g} ({median(sooner[task]):.2g} in seconds)" for task, each in fewer.items()
    )
    alone = ", ".join(f"{task} {median(_speedup(each, 'gradients')):.2g}" for task, each in single.items())
    words = (
        f"times fewer gradients than all the data, with {REDUNDANT} near-duplicates: {told}; of data as they are: "
        f"{alone}; networks: "
        f"{', '.join(f'{task} {each:.2g} times sooner' for task, each in zip(networks, deep, strict=True))} (0: never "
        "there)"
    )
    value = median(fewer[worst])
    return Result(parts, words, value, min(fewer[worst]), max(fewer[worst]), details)


def _speedup(found: Found, what: str) -> list[float]:
    """All the data's gradients or seconds over those of the best-sized coreset, for each seed.

    It is 0 where the coreset is never there. Where all the data are not there, all their gradients count, and the
    figure is a lower bound.
    """
    arm = found.best("ig", "craig")
    ours, full = (getattr(found, what)("ig", name) for name in (arm, "full"))
    last = [course.evaluations[-1] for course in found.courses["ig"]["full"]]
    most = [count * (found.per_gradient if what == "seconds" else 1.0) for count in last]
    return [0.0 if math.isinf(a) else min(b, end) / a for a, b, end in zip(ours, full, most, strict=True)]


def _full_arrives(found: Found) -> bool:
    """Whether most seeds come to the target with all the data; else there is nothing to compare with."""
    return math.isfinite(median(found.gradients("ig", "full")))


def _beats_random(found: Found) -> bool:
    """Whether the best-sized coreset needs fewer gradients than the best-sized random points of either kind."""
    counts = {kind: median(found.gradients("ig", found.best("ig", kind))) for kind in KINDS}
    return all(counts["craig"] < count for kind, count in counts.items() if kind != "craig")


def _network_speedup(courses: Mapping[str, DeepCourse]) -> float:
    """All the data's seconds to within a point of their accuracy over the best coreset's; 0 if it is never there."""
    wanted = courses["full"].accuracies[-1] - POINTS
    seconds = {arm: course.first(wanted, course.seconds) for arm, course in courses.items()}
    ours = min(each for arm, each in seconds.items() if arm.startswith("craig"))
    return 0.0 if math.isinf(ours) else seconds["full"] / ours


# -- convex ------------------------------------------------------------------------------------------------------------


def _convex(plan: Convex) -> Found:
    problem = redundant(_regression(load(plan.task)), plan.copies, plan.originals)
    arms = arms_of(problem, plan.fractions)
    floors = {arm.name: _floor(problem, arm) for arm in arms if arm.name != "full"}
    most = round(plan.passes * problem.n)
    courses = {method: _tuned(problem, arms, method, plan, most) for method in plan.methods}
    return Found(floors, {arm.name: arm.seconds for arm in arms}, seconds_per_gradient(problem), courses)


def _tuned(
    problem: Regression, arms: Sequence[Arm], method: Method, plan: Convex, most: int
) -> dict[str, list[Course]]:
    """For each arm the runs of its best rate and decay: first at the target, or else nearest, with a seed apart."""
    trials = [Trial(arm.name, rate, decay, 1000) for arm in arms for rate, decay in product(plan.rates, plan.decays)]
    tried = race(problem, arms, method, trials, most)
    best: dict[str, tuple[tuple[float, float], Trial]] = {}
    for trial, course in zip(trials, tried, strict=True):
        score = (course.first(TARGET), min(course.residuals))
        if trial.arm not in best or score < best[trial.arm][0]:
            best[trial.arm] = (score, trial)
    chosen = [Trial(arm, t.rate, t.decay, seed) for arm, (_, t) in best.items() for seed in range(plan.seeds)]
    found: dict[str, list[Course]] = {}
    for trial, course in zip(chosen, race(problem, arms, method, chosen, most), strict=True):
        found.setdefault(trial.arm, []).append(course)
    return found


def _floor(problem: Regression, arm: Arm) -> float:
    """The residual at the optimum of the subset itself: training on it comes no nearer."""
    return problem.residual(
        problem.solved(Subset(arm.indices, arm.weights.double() * problem.n / len(arm.indices), problem.n))
    )


def _regression(task: Task) -> Regression:
    data = task.data
    assert isinstance(data, ExampleSet)
    pieces = [data.train.take(rows) for rows in np.array_split(np.arange(len(data.train)), 16)]
    x, y = (torch.cat([piece[k] for piece in pieces]) for k in (0, 1))
    return Regression(task.title, x.flatten(1).float(), y % 2)


def _convex_details(plan: Convex, found: Found) -> dict[str, Any]:
    named = f"{plan.task}, {plan.copies} near-duplicates"
    rows: dict[str, Any] = {f"{named}: seconds per gradient": f"{1e6 * found.per_gradient:.2f} us"}
    for arm, floor in found.floors.items():
        spent = f", chosen in {found.spent[arm]:.3g} s" if arm.startswith("craig") else ""
        rows[f"{named}, {arm}: optimum of the subset"] = f"{floor:.3g} of the gap above that of all the data{spent}"
    for method, arms in found.courses.items():
        for arm, courses in arms.items():
            count = median(found.gradients(method, arm))
            there = "never" if math.isinf(count) else f"{count:,.0f} ({median(found.seconds(method, arm)):.3g} s)"
            least = median(min(course.residuals) for course in courses)
            rows[f"{named}, {method.upper()}, {arm}: gradients to {TARGET:g}"] = f"{there}; least residual {least:.3g}"
    return rows


def _draw_convex(attempt: Attempt, plan: Convex, found: Found) -> None:
    stem = f"{plan.task}-{plan.copies}"
    title = f"{plan.task}, {plan.copies} near-duplicates"
    first = {method: {arm: each[0] for arm, each in arms.items()} for method, arms in found.courses.items()}
    plots.draw_residuals(attempt.folder / f"{stem}-residual.png", title, first, TARGET)
    floors = {kind: [found.floors[f"{kind} {_percent(f)}"] for f in plan.fractions] for kind in KINDS}
    plots.draw_floors(attempt.folder / f"{stem}-floors.png", title, plan.fractions, floors)


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


def _deep_details(plan: Deep, courses: Mapping[str, DeepCourse]) -> dict[str, Any]:
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
    protocol="logistic regression (even or odd digits of scikit-learn's digits and MNIST; a9a) of 1,000 samples as "
    f"they are, and with 5 and {REDUNDANT} near-duplicates of each (Gaussian noise of {NOISE:g} standard deviations of "
    "each feature), weight decay 1e-3; incremental gradient, SAGA and SVRG over single samples with rates that fall "
    "with the epoch, rate and decay tuned for each arm over the same grid of 12 on a seed apart; arms are all the "
    "data, coresets, random points, and random points weighed by the samples nearest to them, in three sizes; 3 seeds; "
    "60, 16 and 6 passes over the data with 1, 5 and 20 copies; networks: MNIST (two layers) and CIFAR-10 (ResNet-8), "
    "selected anew in each epoch, its time counted (quick: digits and a9a with 600 samples, incremental gradient "
    "alone, and the first network)",
    parts={
        "redundant data, gradients": f"with {REDUNDANT} near-duplicates, on every data set, incremental gradient on "
        f"the best-sized coreset needs at least {SPEEDUP:g} times fewer gradients of single samples to a loss within "
        f"{TARGET:g} of the gap between start and optimum than on all the data (median of seeds)",
        "redundant data, seconds": f"and at least {SPEEDUP:g} times fewer seconds, selection included",
        "redundant data, beside random": "and fewer gradients than on random points of either kind, at their best "
        "sizes",
        "data as they are, gradients": f"the first part with every sample once: at least {SPEEDUP:g} times fewer "
        "gradients",
        "networks": f"seconds to {100 * POINTS:g} point below all the data's accuracy at least {NETWORK_SPEEDUP:g} "
        "times fewer on the best-sized coreset, selection included",
    },
    costs="data without near-duplicates: a coreset's own optimum is further from that of all the data than random "
    "points' is at small sizes, and selection takes longer than the epochs that it saves",
    minutes=(30, 3),
    run=measure,
    earlier=(
        Earlier(
            "as now, with weight decay 1e-5, 3 passes over the data, a grid of 8 rates and decays, and no word on what "
            "follows where all the data do not come to the target",
            "nothing was decided: in the quick form no arm came to the target, all the data included",
            "so few passes at so little weight decay end far from the optimum; the new ones were chosen with all the "
            "data alone, without a coreset",
        ),
        Earlier(
            "logistic regression: at least 3 times less time to a loss within 0.01 of the gap between start and "
            "optimum, and less than a random subset of the same size takes, each arm at its best of the same rates",
            "does not hold: no coreset reached 0.01 of the gap before a random subset of its size",
            "steps took 16 samples at a constant rate on data without redundancy; the paper's take one sample at "
            "falling rates, and its first quantity is gradients",
        ),
    ),
)
