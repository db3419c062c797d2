"""Logistic regression on a subset or on everything: how far from the optimum, after how many seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from thinwire.coreset.baselines import even
from thinwire.coreset.selection import select
from thinwire.coreset.subset import Subset, budget_of, keyed
from thinwire.optimizers.saga import Saga
from thinwire.optimizers.svrg import Svrg

Method = Literal["sgd", "saga", "svrg"]
METHODS: tuple[Method, ...] = ("sgd", "saga", "svrg")
_SNAPSHOT_PASSES = 2
_LOOKS_PER_PASS = 8


@dataclass(frozen=True, eq=False)
class Regression:
    """Binary or multinomial logistic regression.

    Args:
        title: what the data are.
        x: float32, [n, features].
        y: int64, [n].
        weight_decay: of the objective.
    """

    title: str
    x: Tensor
    y: Tensor
    weight_decay: float = 1e-5

    @property
    def n(self) -> int:
        """Samples."""
        return len(self.y)

    def layer(self) -> nn.Linear:
        """The model at its start, zero: one output for two classes, else one for each."""
        classes = int(self.y.max()) + 1
        with torch.device("meta"):
            layer = nn.Linear(self.x.shape[1], 1 if classes == 2 else classes)
        layer.to_empty(device="cpu")
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
        return layer

    def losses(self, layer: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each sample in nats, without weight decay."""
        logits: Tensor = layer(x)
        if logits.shape[1] > 1:
            return F.cross_entropy(logits, y, reduction="none")
        return F.softplus(logits[:, 0] * (1 - 2 * y))

    def objective(self, layer: nn.Module) -> float:
        """The loss of all the data, with weight decay."""
        with torch.no_grad():
            decay = sum(float(p.double().square().sum()) for p in layer.parameters()) * self.weight_decay / 2
            return float(self.losses(layer, self.x, self.y).double().mean()) + decay

    def solved(self, subset: Subset) -> nn.Linear:
        """The optimum of the weighted subset: by Newton's method for one output, else nearly, by L-BFGS."""
        layer = self.layer().double()
        x, y = self.x[subset.indices].double(), self.y[subset.indices]

        def objective() -> Tensor:
            decay = torch.stack([p.square().sum() for p in layer.parameters()]).sum()
            return (subset.scaled * self.losses(layer, x, y)).mean() + self.weight_decay / 2 * decay

        if layer.out_features == 1:
            _newton_(layer, x, y, subset.scaled / len(subset), self.weight_decay, objective)
        else:
            _quasi_newton_(layer, objective)
        return layer.float()

    @cached_property
    def best(self) -> float:
        """The objective at the optimum of all the data."""
        return self.objective(self.solved(Subset.whole(self.n)))

    @cached_property
    def start(self) -> float:
        """The objective at zero."""
        return self.objective(self.layer())

    def residual(self, layer: nn.Module) -> float:
        """What is left of the way from the start to the optimum, 1 at the start."""
        return (self.objective(layer) - self.best) / (self.start - self.best)


@dataclass(frozen=True)
class Course:
    """One run: what was left of the way, and when.

    Args:
        seconds: of training, selection included, at each look.
        points: sample gradients taken so far, at each look.
        residuals: at each look.
    """

    seconds: tuple[float, ...]
    points: tuple[int, ...]
    residuals: tuple[float, ...]

    def seconds_to(self, target: float) -> float:
        """When the residual was first no more than the target; infinite if it never was."""
        reached = (t for t, left in zip(self.seconds, self.residuals, strict=True) if left <= target)
        return next(reached, math.inf)


def _newton_(
    layer: nn.Linear, x: Tensor, y: Tensor, weights: Tensor, decay: float, objective: Callable[[], Tensor]
) -> None:
    """Newton's method with halved steps where a whole one goes up, to the end of double precision."""
    ones = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    w = x.new_zeros(ones.shape[1])
    value = math.inf
    for _ in range(100):
        p = torch.sigmoid(ones @ w)
        gradient = ones.T @ (weights * (p - y)) + decay * w
        hessian = (ones.T * (weights * p * (1 - p))) @ ones + decay * torch.eye(len(w), dtype=w.dtype)
        step, before = torch.linalg.solve(hessian, gradient), value
        for halvings in range(30):
            _put_(layer, w - step / 2**halvings)
            value = objective().item()
            if value <= before:
                break
        if not value < before - 1e-15:
            return
        w = torch.cat([layer.weight.detach()[0], layer.bias.detach()])


def _put_(layer: nn.Linear, w: Tensor) -> None:
    with torch.no_grad():
        layer.weight.copy_(w[None, :-1])
        layer.bias.copy_(w[-1:])


def _quasi_newton_(layer: nn.Linear, objective: Callable[[], Tensor], iterations: int = 200) -> None:
    optimizer = torch.optim.LBFGS(
        layer.parameters(),
        max_iter=iterations,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]


def choose(problem: Regression, fraction: float, kind: Literal["craig", "random"], seed: int) -> tuple[Subset, float]:
    """A subset, and the seconds it took to choose: by the distance of features within each class, or by chance.

    Among near neighbours alone, which takes a fraction of the exact selection's time for nearly its objective.
    """
    began = time.perf_counter()
    budget = budget_of(fraction, problem.n)
    if kind == "craig":
        found = Subset.of(select(problem.x, budget=budget, labels=problem.y, method="sparse"))
    else:
        found = even(torch.randperm(problem.n, generator=keyed(seed, 0x2A2D))[:budget], problem.n)
    return found, time.perf_counter() - began


def descend(
    problem: Regression,
    subset: Subset,
    method: Method,
    *,
    lr: float,
    batch_size: int,
    passes: float,
    spent: float,
    target: float,
    seed: int,
) -> Course:
    """Train until the residual is half the target, or so many sample gradients are taken; looking does not count.

    Args:
        problem: all the data, by which the residual is measured.
        subset: what is trained on.
        method: how.
        lr: the constant step size.
        batch_size: samples a step.
        passes: sample gradients to take, in passes over all the data.
        spent: seconds of the selection.
        target: the residual aimed at.
        seed: of the order.
    """
    layer = problem.layer()
    clock, points = 0.0, 0
    seen = [(spent, 0, 1.0)]
    steps = _Steps(problem, subset, layer, method, lr, batch_size)
    pieces = steps.passes(seed)
    while points < passes * problem.n and target / 2 < seen[-1][2] < 10:
        began = time.perf_counter()
        points += next(pieces)
        clock += time.perf_counter() - began
        seen.append((spent + clock, points, problem.residual(layer)))
    return Course(tuple(s for s, _, _ in seen), tuple(p for _, p, _ in seen), tuple(r for _, _, r in seen))


class _Steps:
    """The steps of one method over one subset."""

    def __init__(
        self, problem: Regression, subset: Subset, layer: nn.Linear, method: Method, lr: float, batch_size: int
    ) -> None:
        self.problem = problem
        self.layer = layer
        self.x, self.y = problem.x[subset.indices], problem.y[subset.indices]
        self.weights = subset.scaled.float()
        self.batch_size = min(batch_size, len(subset))
        self.optimizer = _optimizer(method, layer, len(subset), lr, problem.weight_decay)

    def passes(self, seed: int) -> Iterator[int]:
        """An eighth of a pass at a time, for ever; yields the sample gradients taken."""
        for number in range(2**31):
            if isinstance(self.optimizer, Svrg) and number % _SNAPSHOT_PASSES == 0:
                self.optimizer.snapshot(lambda: self.backward(slice(None)))
                yield len(self.y)
            order = torch.randperm(len(self.y), generator=keyed(seed, number))
            batches = order.split(self.batch_size)
            per_look = -(-len(batches) // _LOOKS_PER_PASS)
            for first in range(0, len(batches), per_look):
                part = batches[first : first + per_look]
                yield sum(self.step(rows) for rows in part)

    def backward(self, rows: Tensor | slice) -> float:
        """The gradient of the weighted mean loss of these rows."""
        losses = self.problem.losses(self.layer, self.x[rows], self.y[rows])
        loss = (losses * self.weights[rows]).mean()
        loss.backward()
        return loss.item()

    def step(self, rows: Tensor) -> int:
        """One step; returns the sample gradients it took."""
        if isinstance(self.optimizer, Svrg):
            self.optimizer.step(lambda: self.backward(rows))
            return 2 * len(rows)
        self.optimizer.zero_grad()
        self.backward(rows)
        if isinstance(self.optimizer, Saga):
            self.optimizer.step(indices=rows)
        else:
            self.optimizer.step()
        return len(rows)


def _optimizer(method: Method, layer: nn.Linear, n: int, lr: float, weight_decay: float) -> Optimizer:
    if method == "saga":
        return Saga(layer, n, lr=lr, weight_decay=weight_decay)
    if method == "svrg":
        return Svrg(layer.parameters(), lr, weight_decay=weight_decay)
    return SGD(layer.parameters(), lr=lr, weight_decay=weight_decay)
