# SPDX-License-Identifier: Apache-2.0
"""Least squares on which workers disagree: where decentralised methods come to rest, by equation and by training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from thinwire import Comm, Strategy, attach, run_threads

Matrix = NDArray[np.float64]
_STILL = 1e-12
_LOOK_EVERY = 200


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """Worker i minimises |A_i x - b_i|^2 / 2; together they minimise the mean of that.

    Args:
        features: A, (workers, rows, width).
        targets: b, (workers, rows).
    """

    features: Matrix
    targets: Matrix

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.features)

    @property
    def width(self) -> int:
        """Unknowns."""
        return self.features.shape[2]

    @property
    def optimum(self) -> Matrix:
        """What minimises the mean, (width,)."""
        slopes, pulls = self._normal()
        return np.linalg.solve(slopes.sum(0), pulls.sum(0))

    def rest(self, mixing: Matrix, pull: Matrix) -> Matrix:
        r"""Where $(I - W) X = -P\, G(X)$, (workers, width), for gradients $G$ of the workers at their rows of $X$.

        Args:
            mixing: $W$, doubly stochastic.
            pull: $P$, with the learning rate, such as $\gamma W$ for adapting and then combining.
        """
        slopes, pulls = self._normal()
        apart = np.kron(np.eye(self.workers) - mixing, np.eye(self.width))
        slope = np.einsum("ij,jab->iajb", pull, slopes).reshape(apart.shape)
        return np.linalg.solve(apart + slope, (pull @ pulls).ravel()).reshape(self.workers, self.width)

    def bias(self, rows: Matrix) -> float:
        """The workers' mean squared distance from the optimum, relative to the optimum's own square."""
        return float(((rows - self.optimum) ** 2).sum(1).mean() / (self.optimum**2).sum())

    def _normal(self) -> tuple[Matrix, Matrix]:
        """A'A and A'b of every worker."""
        return (
            np.einsum("nra,nrb->nab", self.features, self.features),
            np.einsum("nra,nr->na", self.features, self.targets),
        )


def drawn(workers: int, *, width: int = 5, seed: int = 0) -> LeastSquares:
    """Workers whose curvatures lie between 0.5 and 1.5, in directions of their own, and whose optima differ."""
    draw = np.random.default_rng(seed)
    turns = np.linalg.qr(draw.standard_normal((workers, width, width)))[0]
    features = np.sqrt(draw.uniform(0.5, 1.5, (workers, width, 1))) * turns
    targets = np.einsum("nra,na->nr", features, 0.5 + draw.standard_normal((workers, width)))
    return LeastSquares(features, targets)


def trained(
    problem: LeastSquares, strategy: Strategy, rates: Sequence[float], *, momentum: float = 0.0, most: int = 40_000
) -> tuple[Matrix, int]:
    """Train in double precision on threads until nothing moves any more, at several learning rates side by side.

    Each learning rate has a copy of the unknowns and is a parameter group of its own.

    Args:
        problem: what is learned.
        strategy: how workers communicate.
        rates: learning rates.
        momentum: of the workers' own SGD.
        most: steps after which the search for a point of rest is given up.

    Returns:
        The rows at rest, (len(rates), workers, width), and the steps it took.
    """

    def body(comm: Comm) -> tuple[Tensor, int]:
        copies = nn.ParameterList([nn.Parameter(torch.zeros(problem.width, dtype=torch.float64)) for _ in rates])
        groups = [{"params": [copy], "lr": rate} for copy, rate in zip(copies, rates, strict=True)]
        worker = attach(copies, optimizer := torch.optim.SGD(groups, momentum=momentum), strategy, comm=comm)
        features, targets = (torch.from_numpy(each[comm.rank]) for each in (problem.features, problem.targets))

        def step() -> None:
            optimizer.zero_grad()
            ((torch.stack(list(copies)) @ features.T - targets).square().sum() / 2).backward()
            optimizer.step()

        steps = _until_still(step, lambda: worker.replicas[0].x, comm, most)
        worker.detach()
        return torch.stack([copy.detach() for copy in copies]), steps

    done = run_threads(problem.workers, body)
    return torch.stack([rows for rows, _ in done], 1).numpy(), done[0][1]


def _until_still(step: Callable[[], None], place: Callable[[], Tensor], comm: Comm, most: int) -> int:
    """Step until no worker has moved between two looks; returns the steps."""
    for done in range(0, most, _LOOK_EVERY):
        before = place().clone()
        for _ in range(_LOOK_EVERY):
            step()
        moved = (place() - before).abs().max().reshape(1)
        if float(comm.all_reduce_(moved).wait()) < _STILL * comm.size:
            return done + _LOOK_EVERY
    return most
