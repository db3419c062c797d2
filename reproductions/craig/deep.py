# SPDX-License-Identifier: Apache-2.0
"""A network on a subset or on everything: how accurate, after how many seconds and after how many points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD

from reproductions.craig.incremental import KINDS, nearest_counts, percent
from thinwire.coreset import Craig, Points
from thinwire.coreset.baselines import Random
from thinwire.coreset.policy import Policy
from thinwire.coreset.subset import Subset, budget_of, keyed
from thinwire.lab.runs.coreset import ChosenData
from thinwire.lab.tasks import Task, load

POINTS = 0.01
_APART = 1000


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, whatever it is trained on.

    Args:
        title: the data and the network.
        task: the data.
        network: makes the network; the seed draws its first parameters.
        batch_size: examples a step.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    title: str
    task: Task
    network: Callable[[int], nn.Module]
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 1e-4


@dataclass(frozen=True)
class DeepCourse:
    """One run, at each of its looks.

    Args:
        seconds: of training, selections included.
        points: examples trained on so far.
        accuracies: on held-out data.
        selection_seconds: of all selections together.
    """

    seconds: tuple[float, ...]
    points: tuple[int, ...]
    accuracies: tuple[float, ...]
    selection_seconds: float

    def first(self, accuracy: float, along: tuple[float, ...] | tuple[int, ...]) -> float:
        """Where along the seconds or the points an accuracy was first reached; infinite if it never was.

        Between the last look below it and the first at or above it, the accuracy is a line.
        """
        before, below = 0.0, math.nan
        for x, a in zip(along, self.accuracies, strict=True):
            if a >= accuracy:
                return x if math.isnan(below) else before + (x - before) * (accuracy - below) / (a - below)
            before, below = float(x), a
        return math.inf


@dataclass(frozen=True)
class Deep:
    """One network's data and grid; every arm is tuned over the same rates, with a seed apart.

    Args:
        task: the data.
        model: of the task; None is two layers.
        fractions: sizes of subsets.
        rates: constant over a run, so that the time to an accuracy depends on no horizon.
        points: examples that a run trains on at most, those seen again counted again.
        seeds: that are judged; each draws first parameters, orders and random points.
    """

    task: str
    model: str | None
    fractions: tuple[float, ...]
    rates: tuple[float, ...]
    points: int
    batch_size: int = 32
    momentum: float = 0.0
    weight_decay: float = 1e-4
    looks: int = 24
    eval_limit: int = 2000
    seeds: int = 3


@dataclass(frozen=True)
class DeepRuns:
    """One arm at its best rate.

    Args:
        rate: chosen with a seed apart.
        apart: that seed's run.
        courses: the judged runs, one for each seed; empty for the sizes that were not chosen.
    """

    rate: float
    apart: DeepCourse
    courses: Sequence[DeepCourse]


@dataclass(frozen=True)
class DeepFound:
    """What came of one network.

    Args:
        wanted: the accuracy to reach.
        runs: by arm.
    """

    wanted: float
    runs: Mapping[str, DeepRuns]

    def judged(self, kind: str) -> str:
        """The arm of a kind whose size was chosen."""
        return next(arm for arm, runs in self.runs.items() if arm.rpartition(" ")[0] == kind and runs.courses)

    def sooner(self, kind: str) -> list[float]:
        """By seed, all the data's seconds to the accuracy over those of a kind; 0 where that kind is never there.

        Where all the data are never there, all their seconds count, and the figure is a lower bound.
        """
        figures: list[float] = []
        for full, ours in zip(self.runs["full"].courses, self.runs[self.judged(kind)].courses, strict=True):
            taken = ours.first(self.wanted, ours.seconds)
            most = min(full.first(self.wanted, full.seconds), full.seconds[-1])
            figures.append(0.0 if math.isinf(taken) else most / taken)
        return figures

    def arrives(self) -> bool:
        """Whether most seeds come to the accuracy with all the data."""
        courses = self.runs["full"].courses
        return math.isfinite(median(course.first(self.wanted, course.points) for course in courses))


@dataclass(frozen=True)
class WeightedRandom(Policy):
    """Random points, each weighted by how many of its class have logit gradients nearest to its own."""

    def choose(self, points: Points, seed: int) -> Subset:
        """Draw without replacement, then count."""
        rows = torch.randperm(points.n, generator=keyed(seed, 0x2A2D))[: budget_of(self.fraction, points.n)]
        return Subset(rows, nearest_counts(points.gradients().residuals, points.labels, rows).double(), points.n)


def measure_network(plan: Deep) -> DeepFound:
    """Choose rates and sizes with a seed apart, then run the arms in turns, seed by seed."""
    task = load(plan.task)

    def network(seed: int) -> nn.Module:
        features = {"mnist": 784, "digits": 64}.get(plan.task, 0)
        return two_layers(features, 10, seed) if plan.model is None else task.model(plan.model, seed=seed)

    recipe = Recipe(plan.task, task, network, plan.batch_size, plan.momentum, plan.weight_decay)

    def train(policy: Policy | None, lr: float, seed: int, until: float) -> DeepCourse:
        looks, limit = plan.looks, plan.eval_limit
        return train_network(
            recipe, policy, lr=lr, points=plan.points, looks=looks, eval_limit=limit, seed=seed, until=until
        )

    policies: dict[str, Policy | None] = {"full": None}
    for fraction in plan.fractions:
        policies[f"craig {percent(fraction)}"] = Craig(fraction, every=1, method="sparse")
        policies[f"random {percent(fraction)}"] = Random(fraction, every=1)
        policies[f"weighted random {percent(fraction)}"] = WeightedRandom(fraction, every=1)
    tried = {"full": {lr: train(None, lr, _APART, math.inf) for lr in plan.rates}}
    # The mean of the last looks, since a single one at a constant rate is noisy.
    wanted = max(sum(course.accuracies[-3:]) / 3 for course in tried["full"].values()) - POINTS
    for arm, policy in policies.items():
        if policy is not None:
            tried[arm] = {lr: train(policy, lr, _APART, wanted) for lr in plan.rates}
    rates = {arm: min(courses, key=lambda lr: _score(courses[lr], wanted, "points")) for arm, courses in tried.items()}
    chosen = {"full"} | {
        min(
            (arm for arm in policies if arm.rpartition(" ")[0] == kind),
            key=lambda arm: _score(tried[arm][rates[arm]], wanted, "seconds"),
        )
        for kind in KINDS
    }
    courses: dict[str, list[DeepCourse]] = {arm: [] for arm in policies}
    for seed in range(plan.seeds):
        for arm in (arm for arm in policies if arm in chosen):
            courses[arm].append(train(policies[arm], rates[arm], seed, wanted))
    return DeepFound(wanted, {arm: DeepRuns(rates[arm], tried[arm][rates[arm]], courses[arm]) for arm in policies})


def _score(course: DeepCourse, wanted: float, what: Literal["points", "seconds"]) -> tuple[float, float]:
    """Less is better: points or seconds to the accuracy, then the errors at the end."""
    return course.first(wanted, course.points if what == "points" else course.seconds), -course.accuracies[-1]


def two_layers(features: int, classes: int, seed: int) -> nn.Module:
    """A hidden layer of 100 sigmoids."""
    draw = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = nn.Sequential(nn.Flatten(), nn.Linear(features, 100), nn.Sigmoid(), nn.Linear(100, classes))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            deviation = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.0
            parameter.copy_(deviation * torch.randn(parameter.shape, generator=draw))
    return model


def train_network(
    recipe: Recipe,
    policy: Policy | None,
    *,
    lr: float,
    points: int,
    looks: int = 24,
    eval_limit: int | None = 2000,
    seed: int = 0,
    until: float = math.inf,
) -> DeepCourse:
    """Train on so many examples, or to an accuracy; the clock counts choosing, and not looking at held-out data.

    Args:
        recipe: what is trained, and how.
        policy: what it is trained on; None is everything.
        lr: the learning rate, constant.
        points: examples to train on, those seen again counted again.
        looks: evaluations, evenly over all the points.
        eval_limit: held-out examples looked at; None is all.
        seed: of the first parameters, of orders and draws.
        until: the accuracy at which the run ends.
    """
    model = recipe.network(seed)
    optimizer = SGD(model.parameters(), lr=lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    data, loss_of = _source(recipe, policy, model, optimizer, seed)
    clock, steps = 0.0, -(-points // recipe.batch_size)
    seen = [(0.0, 0, recipe.task.evaluate(model, limit=eval_limit).metric)]
    for step in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
        clock += time.perf_counter() - began
        if (step + 1) * looks >= len(seen) * steps:
            accuracy = recipe.task.evaluate(model, limit=eval_limit).metric
            seen.append((clock, (step + 1) * recipe.batch_size, accuracy))
            if accuracy >= until:
                break
    spent = 0.0 if data is None else data.seconds
    return DeepCourse(tuple(s for s, _, _ in seen), tuple(p for _, p, _ in seen), tuple(a for _, _, a in seen), spent)


def _source(
    recipe: Recipe, policy: Policy | None, model: nn.Module, optimizer: SGD, seed: int
) -> tuple[ChosenData | None, Callable[[int], Tensor]]:
    """What is trained on, and the loss of each step."""
    task, size = recipe.task, recipe.batch_size
    (shard,) = task.shards(1, split="iid", seed=seed)
    if policy is None:
        return None, lambda step: task.loss(model, task.batch(shard, step, batch_size=size, seed=seed, rank=0))
    data = ChosenData(policy, task, shard, model=model, optimizer=optimizer, batch_size=size, seed=seed, rank=0)
    return data, lambda step: data.loss(model, step)
