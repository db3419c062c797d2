# SPDX-License-Identifier: Apache-2.0
"""Incremental gradient, SAGA and SVRG over single samples: many runs side by side, as rows of one matrix."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reproductions.craig.convex import Regression, choose
from thinwire.coreset.subset import budget_of, keyed

Method = Literal["ig", "saga", "svrg"]
METHODS: tuple[Method, ...] = ("ig", "saga", "svrg")
KINDS = ("craig", "random", "weighted random")
NOISE = 0.1
WEIGHT_DECAY = 1e-3
_LOOKS = 60
_SNAPSHOT_PASSES = 2


@dataclass(frozen=True, eq=False)
class Arm:
    """What is trained on.

    Args:
        name: "full", or the kind and the size, such as "craig 5%".
        indices: of the samples, [size].
        weights: of each, with mean 1, [size].
        seconds: that choosing them took.
    """

    name: str
    indices: Tensor
    weights: Tensor
    seconds: float = 0.0


@dataclass(frozen=True)
class Trial:
    """One run: its arm, its rate in epoch k, `rate / (1 + decay k)`, and the seed of its orders."""

    arm: str
    rate: float
    decay: float
    seed: int


@dataclass(frozen=True)
class Course:
    """One run: what was left of the way to the optimum after how many gradients of single samples."""

    evaluations: tuple[int, ...]
    residuals: tuple[float, ...]

    def first(self, target: float) -> float:
        """The gradients after which the residual was no more than the target; infinite if it never was."""
        pairs = zip(self.evaluations, self.residuals, strict=True)
        return next((float(count) for count, left in pairs if left <= target), math.inf)


def redundant(problem: Regression, copies: int, most: int) -> Regression:
    """So many near-duplicates of each of at most `most` samples.

    The first is the sample itself; the others have Gaussian noise added to each feature, of a tenth of the feature's
    standard deviation.
    """
    rows = torch.randperm(problem.n, generator=keyed(0, 0x1D0))[:most]
    x, y = problem.x[rows], problem.y[rows]
    noise = torch.randn(len(rows) * (copies - 1), x.shape[1], generator=keyed(copies, 0x1D1))
    others = x.repeat(copies - 1, 1) + NOISE * x.std(0) * noise
    return Regression(problem.title, torch.cat([x, others]), y.repeat(copies), WEIGHT_DECAY)


def arms_of(problem: Regression, fractions: Sequence[float]) -> list[Arm]:
    """All the data, and coresets and random points of each size.

    Weights of points drawn at random, times any constant, are the same arm: its learning rate is tuned. So there are
    random points that weigh the same, and random points that weigh as many samples as they are the nearest to.
    """
    found = [Arm("full", torch.arange(problem.n), torch.ones(problem.n))]
    for fraction in fractions:
        size = f"{100 * fraction:g}%"
        subset, seconds = choose(problem, fraction, "craig", 0)
        found.append(Arm(f"craig {size}", subset.indices, subset.scaled.float(), seconds))
        rows = torch.randperm(problem.n, generator=keyed(0, 0x2A2D))[: budget_of(fraction, problem.n)]
        found.append(Arm(f"random {size}", rows, torch.ones(len(rows))))
        found.append(Arm(f"weighted random {size}", rows, _nearest_counts(problem, rows)))
    return found


def _nearest_counts(problem: Regression, rows: Tensor) -> Tensor:
    """How many samples of its class each of these is the nearest to, with mean 1."""
    counts = torch.zeros(len(rows))
    for label in problem.y.unique():
        mine = torch.nonzero(problem.y[rows] == label)[:, 0]
        if len(mine):
            for part in torch.nonzero(problem.y == label)[:, 0].split(4096):
                nearest = torch.cdist(problem.x[part], problem.x[rows[mine]]).argmin(1)
                counts += torch.bincount(mine[nearest], minlength=len(rows))
    # The only sample of its class in both has no other; a copy of another drawn sample may have none at all.
    counts.clamp_(min=1.0)
    return counts * len(rows) / counts.sum()


def race(problem: Regression, arms: Sequence[Arm], method: Method, trials: Sequence[Trial], most: int) -> list[Course]:
    """Run all trials side by side until each has taken so many gradients of single samples.

    Args:
        problem: binary, by whose objective over all samples the residual is measured.
        arms: by name in the trials.
        method: of all runs.
        trials: one run each.
        most: gradients of single samples that each run takes.
    """
    state = _Runs(problem, {arm.name: arm for arm in arms}, method, trials)
    looks: list[tuple[list[int], list[float]]] = [(state.evaluations.tolist(), state.residuals())]
    every = max(1, most // _LOOKS // (2 if method == "svrg" else 1))
    taken = 0
    while int(state.evaluations.min()) < most:
        state.step()
        taken += 1
        if taken % every == 0:
            looks.append((state.evaluations.tolist(), state.residuals()))
    looks.append((state.evaluations.tolist(), state.residuals()))
    return [
        Course(tuple(counts[run] for counts, _ in looks), tuple(lefts[run] for _, lefts in looks))
        for run in range(len(trials))
    ]


class _Runs:
    """The parameters of all runs, [runs, features + 1], and where each is in its data."""

    def __init__(self, problem: Regression, arms: dict[str, Arm], method: Method, trials: Sequence[Trial]) -> None:
        assert int(problem.y.max()) == 1, "binary"
        self.problem, self.method, self.trials = problem, method, trials
        self.arms = [arms[trial.arm] for trial in trials]
        self.x = torch.cat([problem.x, torch.ones(problem.n, 1)], 1)
        self.y = problem.y.float()
        runs, features = len(trials), self.x.shape[1]
        self.sizes = torch.tensor([len(arm.indices) for arm in self.arms])
        width = int(self.sizes.max())
        self.indices = torch.zeros(runs, width, dtype=torch.long)
        self.weights = torch.zeros(runs, width)
        for run, arm in enumerate(self.arms):
            self.indices[run, : len(arm.indices)] = arm.indices
            self.weights[run, : len(arm.indices)] = arm.weights
        self.w = torch.zeros(runs, features)
        self.rates = torch.tensor([trial.rate for trial in trials])
        self.decays = torch.tensor([trial.decay for trial in trials])
        self.order = torch.zeros(runs, width, dtype=torch.long)
        self.place = torch.zeros(runs, dtype=torch.long)
        self.epoch = torch.zeros(runs, dtype=torch.long)
        self.evaluations = torch.zeros(runs, dtype=torch.long)
        self.rows = torch.arange(runs)
        # Of weight decay the constant feature is free.
        self.decay = torch.full((features,), problem.weight_decay)
        self.decay[-1] = 0
        # SAGA: the factor of each sample's last gradient; SAGA and SVRG: the mean gradient that goes with it.
        self.table = torch.zeros(runs, width if method == "saga" else 0)
        self.mean = torch.zeros(runs, features)
        self.anchor = self.w.clone()
        if method == "saga":
            self._fill_table()

    def step(self) -> None:
        """One sample of each run."""
        for run in torch.nonzero(self.place == 0)[:, 0].tolist():
            self._begin_epoch(run)
        local = self.order[self.rows, self.place]
        samples = self.indices[self.rows, local]
        x, y, weight = self.x[samples], self.y[samples], self.weights[self.rows, local]
        factor = weight * (torch.sigmoid((self.w * x).sum(1)) - y)
        rate = (self.rates / (1 + self.decays * self.epoch))[:, None]
        if self.method == "ig":
            direction = factor[:, None] * x
        elif self.method == "saga":
            change = (factor - self.table[self.rows, local])[:, None] * x
            direction = change + self.mean
            self.mean += change / self.sizes[:, None]
            self.table[self.rows, local] = factor
        else:
            before = weight * (torch.sigmoid((self.anchor * x).sum(1)) - y)
            direction = (factor - before)[:, None] * x + self.mean
        self.w -= rate * (direction + self.decay * self.w)
        self.evaluations += 2 if self.method == "svrg" else 1
        self.place += 1
        ended = self.place == self.sizes
        self.place[ended] = 0
        self.epoch += ended

    def residuals(self) -> list[float]:
        """What is left of the way to the optimum, of each run; infinite where it has diverged."""
        logits = self.x @ self.w.T
        losses = torch.nn.functional.softplus(logits * (1 - 2 * self.y)[:, None]).double().mean(0)
        losses += (self.w.double().square() * self.decay).sum(1) / 2
        left = (losses - self.problem.best) / (self.problem.start - self.problem.best)
        return [value if math.isfinite(value) else math.inf for value in left.tolist()]

    def _begin_epoch(self, run: int) -> None:
        size, trial = int(self.sizes[run]), self.trials[run]
        generator = keyed(trial.seed, int(self.epoch[run]))
        self.order[run, :size] = torch.randperm(size, generator=generator)
        if self.method == "svrg" and int(self.epoch[run]) % _SNAPSHOT_PASSES == 0:
            self.anchor[run] = self.w[run]
            self.mean[run] = self._gradient(run)[1]
            self.evaluations[run] += size

    def _fill_table(self) -> None:
        """SAGA starts with the gradients of all samples, which count."""
        for run, size in enumerate(self.sizes.tolist()):
            self.table[run, :size], self.mean[run] = self._gradient(run)
            self.evaluations[run] += size

    def _gradient(self, run: int) -> tuple[Tensor, Tensor]:
        """The factor of every sample of a run, and their mean gradient, without weight decay."""
        size = int(self.sizes[run])
        x = self.x[self.indices[run, :size]]
        factors = self.weights[run, :size] * (torch.sigmoid(x @ self.w[run]) - self.y[self.indices[run, :size]])
        return factors, factors @ x / size


def seconds_per_gradient(problem: Regression, samples: int = 2000) -> float:
    """How long one step of incremental gradient takes by itself, as a loop over NumPy vectors has it."""
    x, y = torch.cat([problem.x, torch.ones(problem.n, 1)], 1).numpy(), problem.y.numpy()
    w = 0.0 * x[0]
    began = time.perf_counter()
    for row in range(samples):
        at = row % len(y)
        w -= 0.01 * ((1 / (1 + math.exp(-min(30.0, max(-30.0, float(w @ x[at]))))) - y[at]) * x[at] + 1e-5 * w)
    return (time.perf_counter() - began) / samples
