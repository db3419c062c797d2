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
# Looks lie so far apart, as ratios of gradients; differences of no more than one are none.
SPACING, COARSE = 1.05, 1.15
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

    arm: Arm
    rate: float
    decay: float
    seed: int


@dataclass(frozen=True)
class Course:
    """One run: what was left of the way to the optimum after how many gradients of single samples."""

    evaluations: tuple[int, ...]
    residuals: tuple[float, ...]

    def first(self, target: float) -> float:
        """The gradients after which the residual was no more than the target; infinite if it never was.

        Between the last look above the target and the first at or below it, the logarithm of the residual is a line.
        """
        before, above = 0, math.inf
        for count, left in zip(self.evaluations, self.residuals, strict=True):
            if left <= target:
                if left <= 0 or math.isinf(above):
                    return float(count)
                return before + (count - before) * math.log(above / target) / math.log(above / left)
            before, above = count, left
        return math.inf


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


def coresets_of(problem: Regression, fractions: Sequence[float]) -> list[Arm]:
    """All the data, and a coreset of each size; nothing about them is drawn."""
    found = [Arm("full", torch.arange(problem.n), torch.ones(problem.n))]
    for fraction in fractions:
        subset, seconds = choose(problem, fraction)
        found.append(Arm(f"craig {percent(fraction)}", subset.indices, subset.scaled.float(), seconds))
    return found


def random_arms(problem: Regression, fractions: Sequence[float], seed: int) -> list[Arm]:
    """Random points of each size, drawn by the seed.

    Weights of points drawn at random, times any constant, are the same arm: its learning rate is tuned. So there are
    random points that weigh the same, and random points that weigh as many samples as they are the nearest to.
    """
    found: list[Arm] = []
    for fraction in fractions:
        rows = torch.randperm(problem.n, generator=keyed(seed, 0x2A2D))[: budget_of(fraction, problem.n)]
        found.append(Arm(f"random {percent(fraction)}", rows, torch.ones(len(rows))))
        found.append(Arm(f"weighted random {percent(fraction)}", rows, nearest_counts(problem.x, problem.y, rows)))
    return found


def percent(fraction: float) -> str:
    """A size as the names of arms have it."""
    return f"{100 * fraction:g}%"


def nearest_counts(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """How many samples of its class each of these is the nearest to, with mean 1."""
    counts = torch.zeros(len(rows))
    for label in y.unique():
        mine = torch.nonzero(y[rows] == label)[:, 0]
        if len(mine):
            for part in torch.nonzero(y == label)[:, 0].split(4096):
                nearest = torch.cdist(x[part], x[rows[mine]]).argmin(1)
                counts += torch.bincount(mine[nearest], minlength=len(rows))
    # The only sample of its class in both has no other; a copy of another drawn sample may have none at all.
    counts.clamp_(min=1.0)
    return counts * len(rows) / counts.sum()


def race(
    problem: Regression,
    method: Method,
    trials: Sequence[Trial],
    most: int,
    *,
    target: float = -math.inf,
    together: bool = False,
    spacing: float = SPACING,
) -> list[Course]:
    """Run all trials side by side, each until the target, until it diverges, or until so many gradients are taken.

    Args:
        problem: binary, by whose objective over all samples the residual is measured.
        method: of all runs.
        trials: one run each.
        most: gradients of single samples that each run takes, or up to one look more.
        target: the residual at which a run ends.
        together: end all runs of an arm with the first that comes to the target; the others cannot be chosen.
        spacing: of looks, as the ratio of the steps of one to those of the look before.
    """
    state = _Runs(problem, method, trials)
    looks: list[tuple[list[int], list[float]]] = [([], []) for _ in trials]
    running = list(range(len(trials)))
    taken, following = 0, max(1, most // 2000)
    while running:
        for run, count, left in zip(running, state.evaluations.tolist(), state.residuals(), strict=True):
            looks[run][0].append(count)
            looks[run][1].append(left)
        last = {run: (looks[run][0][-1], looks[run][1][-1]) for run in running}
        arrived = {trials[run].arm.name for run, (_, left) in last.items() if left <= target} if together else set()
        kept = [
            row
            for row, run in enumerate(running)
            if last[run][0] < most and target < last[run][1] < math.inf and trials[run].arm.name not in arrived
        ]
        if len(kept) < len(running):
            running = [running[row] for row in kept]
            state.keep(kept)
        while running and taken < following:
            state.step()
            taken += 1
        following = min(max(taken + 1, round(taken * spacing)), max(taken + 1, most))
    return [Course(tuple(counts), tuple(lefts)) for counts, lefts in looks]


class _Runs:
    """The parameters of all runs, [runs, features + 1], and where each is in its data."""

    def __init__(self, problem: Regression, method: Method, trials: Sequence[Trial]) -> None:
        assert int(problem.y.max()) == 1, "binary"
        self.problem, self.method, self.trials = problem, method, list(trials)
        self.x = torch.cat([problem.x, torch.ones(problem.n, 1)], 1)
        self.y = problem.y.float()
        runs, features = len(trials), self.x.shape[1]
        self.sizes = torch.tensor([len(trial.arm.indices) for trial in trials])
        width = int(self.sizes.max())
        self.indices = torch.zeros(runs, width, dtype=torch.long)
        self.weights = torch.zeros(runs, width)
        for run, trial in enumerate(trials):
            self.indices[run, : len(trial.arm.indices)] = trial.arm.indices
            self.weights[run, : len(trial.arm.indices)] = trial.arm.weights
        self.w = torch.zeros(runs, features)
        self.rates = torch.tensor([trial.rate for trial in trials])
        self.decays = torch.tensor([trial.decay for trial in trials])
        self.order = torch.zeros(runs, width, dtype=torch.long)
        self.place = torch.zeros(runs, dtype=torch.long)
        self.epoch = torch.zeros(runs, dtype=torch.long)
        self.evaluations = torch.zeros(runs, dtype=torch.long)
        self.rows = torch.arange(runs)
        # Of all features, the constant one too, as `Regression.objective` has it.
        self.decay = problem.weight_decay
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

    def keep(self, rows: list[int]) -> None:
        """Go on with these runs alone."""
        self.trials = [self.trials[row] for row in rows]
        for name in (
            *("sizes", "indices", "weights", "w", "rates", "decays", "order", "place", "epoch", "evaluations"),
            *("table", "mean", "anchor"),
        ):
            setattr(self, name, getattr(self, name)[rows])
        self.rows = torch.arange(len(rows))

    def residuals(self) -> list[float]:
        """What is left of the way to the optimum, of each run; infinite where it has diverged."""
        logits = self.x @ self.w.T
        losses = torch.nn.functional.softplus(logits * (1 - 2 * self.y)[:, None]).double().mean(0)
        losses += self.w.double().square().sum(1) * self.decay / 2
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


def seconds_per_gradient(problem: Regression, arm: Arm, samples: int = 4000) -> float:
    """How long one step of incremental gradient takes by itself, as a loop over NumPy vectors has it.

    It visits the arm's own samples at random: those of a small subset stay in the processor's cache.
    """
    x, y = torch.cat([problem.x, torch.ones(problem.n, 1)], 1).numpy(), problem.y.numpy()
    order = torch.randint(len(arm.indices), (samples,), generator=keyed(0, 0x1D2))
    rows, weights = arm.indices[order].tolist(), arm.weights[order].tolist()
    w, decay = 0.0 * x[0], problem.weight_decay
    began = time.perf_counter()
    for at, weight in zip(rows, weights, strict=True):
        slope = 1 / (1 + math.exp(-min(30.0, max(-30.0, float(w @ x[at]))))) - y[at]
        w -= 0.01 * (weight * slope * x[at] + decay * w)
    return (time.perf_counter() - began) / samples
