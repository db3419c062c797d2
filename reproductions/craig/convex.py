# SPDX-License-Identifier: Apache-2.0
"""Logistic regression on a subset or on everything: its optimum, and how far from it parameters are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.coreset import select
from thinwire.coreset.subset import Subset, budget_of


@dataclass(frozen=True, eq=False)
class Regression:
    """Binary or multinomial logistic regression.

    Its objective decays every parameter, the intercept included: so it is strongly convex, as the paper's theorem has
    it, on a subset of one class too. Runs, optima and residuals all have this one objective.

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
        # The layer may have double precision; single precision would leave rounding that exceeds a small residual.
        precision = next(layer.parameters()).dtype
        with torch.no_grad():
            decay = sum(float(p.double().square().sum()) for p in layer.parameters()) * self.weight_decay / 2
            return float(self.losses(layer, self.x.to(precision), self.y).double().mean()) + decay

    def solved(self, subset: Subset) -> nn.Linear:
        """The optimum of the weighted subset, in double precision: by Newton's method, for more classes by L-BFGS."""
        layer = self.layer().double()
        x, y = self.x[subset.indices].double(), self.y[subset.indices]

        def objective() -> Tensor:
            decay = torch.stack([p.square().sum() for p in layer.parameters()]).sum()
            return (subset.scaled * self.losses(layer, x, y)).mean() + self.weight_decay / 2 * decay

        if layer.out_features == 1:
            _newton_(layer, x, y, subset.scaled / len(subset), self.weight_decay, objective)
        else:
            _quasi_newton_(layer, objective)
        return layer

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


def choose(problem: Regression, fraction: float) -> tuple[Subset, float]:
    """A coreset by the distance of features within each class, and the seconds it took to choose; nothing is drawn.

    Among near neighbours alone, which takes a fraction of the exact selection's time for nearly its objective.
    """
    began = time.perf_counter()
    budget = budget_of(fraction, problem.n)
    found = Subset.of(select(problem.x, budget=budget, labels=problem.y, method="sparse"))
    return found, time.perf_counter() - began
