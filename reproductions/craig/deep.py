# SPDX-License-Identifier: Apache-2.0
"""A network on a subset or on everything: how accurate, after how many seconds and after how many points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD

from thinwire.coreset.policy import Policy
from thinwire.runs.coreset import ChosenData
from thinwire.tasks import Task


@dataclass(frozen=True)
class Recipe:
    """How a network is trained, whatever it is trained on.

    Args:
        title: the data and the network.
        task: the data.
        network: makes the network, always with the same first parameters.
        batch_size: examples a step.
        momentum: of SGD.
        weight_decay: of SGD.
    """

    title: str
    task: Task
    network: Callable[[], nn.Module]
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
        """Where along the seconds or the points an accuracy was first reached; infinite if it never was."""
        return next((x for x, a in zip(along, self.accuracies, strict=True) if a >= accuracy), math.inf)


def two_layers(features: int, classes: int) -> nn.Module:
    """A hidden layer of 100 sigmoids, with the same first parameters each time."""
    draw = torch.Generator().manual_seed(0)
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
    looks: int = 12,
    eval_limit: int | None = 2000,
    seed: int = 0,
) -> DeepCourse:
    """Train on so many examples; the clock counts choosing, and not looking at held-out data.

    Args:
        recipe: what is trained, and how.
        policy: what it is trained on; None is everything.
        lr: the learning rate, falling to nothing over the run as a cosine does.
        points: examples to train on, those seen again counted again.
        looks: evaluations, evenly over the run.
        eval_limit: held-out examples looked at; None is all.
        seed: of orders and draws.
    """
    model = recipe.network()
    optimizer = SGD(model.parameters(), lr=lr, momentum=recipe.momentum, weight_decay=recipe.weight_decay)
    data, loss_of = _source(recipe, policy, model, optimizer, seed)
    clock, steps = 0.0, -(-points // recipe.batch_size)
    seen = [(0.0, 0, recipe.task.evaluate(model, limit=eval_limit).metric)]
    for step in range(steps):
        began = time.perf_counter()
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        loss_of(step).backward()
        optimizer.step()
        clock += time.perf_counter() - began
        if (step + 1) * looks >= len(seen) * steps:
            accuracy = recipe.task.evaluate(model, limit=eval_limit).metric
            seen.append((clock, (step + 1) * recipe.batch_size, accuracy))
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
