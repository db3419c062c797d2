# SPDX-License-Identifier: Apache-2.0
"""Logistic regression by coded gradients of all the data: what the rules of bits promise, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from reproductions.dqsgd.thread_runs import PATIENCE_SECONDS
from reproductions.dqsgd.weights import error_weights
from thinwire import DQSGD, Comm, ErrorBound, attach, run_threads
from thinwire.lab.tasks import Task
from thinwire.lab.tasks.data.examples import ExampleSet
from thinwire.methods.strategies.gradients.bit_rules import BitLedger
from thinwire.methods.strategies.gradients.bits import contraction, fewest_bits, square_of


@dataclass(frozen=True, eq=False)
class Convex:
    """Are these digits even? Strongly convex by its weight decay, with no noise: workers use all their data.

    Args:
        x: [n, features], in double precision.
        y: [n], 0 or 1.
        workers: among which the rows are divided, one row each in turn.
        decay: of the objective.
    """

    x: Tensor
    y: Tensor
    workers: int
    decay: float

    @cached_property
    def smoothness(self) -> float:
        """The largest curvature of any worker's objective."""
        pieces = [self.x[rank :: self.workers] for rank in range(self.workers)]
        return max(float(torch.linalg.eigvalsh(p.T @ p / len(p))[-1]) / 4 for p in pieces) + self.decay

    def objective(self, w: Tensor, rank: int | None = None) -> Tensor:
        """Of one worker's rows, or of all workers alike."""
        if rank is None:
            return torch.stack([self.objective(w, each) for each in range(self.workers)]).mean()
        rows = slice(rank, None, self.workers)
        return binary_cross_entropy_with_logits(self.x[rows] @ w, self.y[rows]) + self.decay / 2 * w.square().sum()

    @cached_property
    def best(self) -> float:
        """The optimum, by Newton's method."""
        w, identity = torch.zeros(self.x.shape[1], dtype=torch.float64), torch.eye(self.x.shape[1], dtype=torch.float64)
        weights = torch.empty_like(self.y)
        for rank in range(self.workers):
            own = weights[rank :: self.workers]
            own.fill_(1 / len(own) / self.workers)
        for _ in range(30):
            p = torch.sigmoid(self.x @ w)
            gradient = self.x.T @ (weights * (p - self.y)) + self.decay * w
            curvature = (self.x.T * (weights * p * (1 - p))) @ self.x + self.decay * identity
            w = w - torch.linalg.solve(curvature, gradient)
        return float(self.objective(w))


@dataclass(frozen=True)
class Kept:
    """One run under a bound.

    Attributes:
        gap: how far the loss ended above the optimum.
        bound: what theory allows that to be.
        added: what quantisation has added to the bound, by the ledger, of what it was allowed to.
        bits: of each step.
        fewest: their sum, had all gradients of the run been known beforehand.
        squares: of each step's gradients, by which that is judged.
    """

    gap: float
    bound: float
    added: float
    bits: tuple[int, ...]
    fewest: int
    squares: tuple[float, ...]

    @property
    def excess(self) -> float:
        """The share of bits more than the fewest."""
        return sum(self.bits) / self.fewest - 1


def parity(task: Task, workers: int, decay: float = 0.05) -> Convex:
    """Even against odd digits, in pixels of unit variance."""
    data = task.data
    assert isinstance(data, ExampleSet)
    x, y = data.train.take(torch.arange(len(data.train)).numpy())
    x = x.flatten(1).double()
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-3) / x.shape[1] ** 0.5
    return Convex(torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1), (y % 2).double(), workers, decay)


def kept(problem: Convex, *, error: float, steps: int, lr: float, seed: int, block: int = 64) -> Kept:
    """Train under a bound on the error, once, with real threads.

    Args:
        problem: what is minimised.
        error: what quantisation may add to the loss.
        steps: of the run.
        lr: the constant learning rate.
        seed: of the draws.
        block: entries that share a scale.
    """
    rule = ErrorBound(error, steps, smoothness=problem.smoothness, strong_convexity=problem.decay)
    strategy = DQSGD(rule, block)

    def body(comm: Comm) -> tuple[float, BitLedger, list[int], list[float]]:
        model = nn.ParameterList([torch.zeros(problem.x.shape[1], dtype=torch.float64)])
        (w,) = model
        optimizer = torch.optim.SGD(model.parameters(), lr)
        worker = attach(model, optimizer, strategy, comm=comm, seed=seed)
        (r,) = worker.replicas
        bits, squares, gap = list[int](), list[float](), 0.0
        for step in range(steps + 1):  # the last one settles the ledger of the one before
            if step == steps:
                gap = float(problem.objective(w.detach())) - problem.best
            optimizer.zero_grad()
            own = problem.objective(w, comm.rank)
            squares.append(float(square_of(torch.autograd.grad(own, w, retain_graph=True)[0], block)))
            own.backward()
            bits += r.state["sent"][:, 2].tolist()
            optimizer.step()
        worker.detach()
        return gap, BitLedger.read(r.state["ledger"]), bits[:-1], squares[:-1]

    ended = run_threads(problem.workers, body, timeout=PATIENCE_SECONDS)
    gap, ledger, bits, _ = ended[0]
    means = [fmean(each) for each in zip(*(squares for *_, squares in ended), strict=True)]
    share = (1 / problem.workers + 1) / 3
    weights = error_weights(
        means,
        [lr] * steps,
        smoothness=problem.smoothness,
        strong_convexity=problem.decay,
        share=share,
    )
    start = float(problem.objective(torch.zeros(problem.x.shape[1], dtype=torch.float64))) - problem.best
    bound = contraction(lr, problem.smoothness, problem.decay) ** steps * start + error
    return Kept(gap, bound, ledger.error / error, tuple(bits), sum(fewest_bits(weights, error)), tuple(means))
