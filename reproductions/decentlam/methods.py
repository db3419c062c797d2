# SPDX-License-Identifier: Apache-2.0
"""The decentralised momentum methods side by side: how to ask for each, and where it should come to rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reproductions.decentlam.least_squares import LeastSquares, Matrix
from thinwire import AllReduce, DecentLaM, DoubleAveraging, ExactDiffusion, Gossip, QuasiGlobal, Strategy, Topology

Pull = Callable[[Matrix, float], Matrix]


@dataclass(frozen=True)
class Method:
    """One method of the literature.

    Args:
        name: as the literature calls it.
        recipe: the strategy on a graph, given a momentum.
        pull: the matrix before the gradients at rest, given W and the momentum, for a learning rate of 1; None where
            there is no bias.
        lends: the momentum is the optimizer's own.
        slow: steps are as short as without momentum, so that 1 / (1 - momentum) times the learning rate compares.
    """

    name: str
    recipe: Callable[[Topology, float], Strategy]
    pull: Pull | None
    lends: bool = False
    slow: bool = False

    def own_momentum(self, momentum: float) -> float:
        """What the workers' optimizer is given."""
        return momentum if self.lends else 0.0

    def rest(self, problem: LeastSquares, graph: Topology, lr: float, momentum: float) -> Matrix:
        """Where every worker should come to rest, (workers, width)."""
        if self.pull is None:
            return np.tile(problem.optimum, (problem.workers, 1))
        mixing = graph.matrix(problem.workers, 0)
        return problem.rest(mixing, lr * self.pull(mixing, momentum))


def _adapted_first(w: Matrix, momentum: float) -> Matrix:
    return w


def _doubly_averaged(w: Matrix, momentum: float) -> Matrix:
    return w @ np.linalg.inv(np.eye(len(w)) - momentum * w)


METHODS = (
    Method("PmSGD", lambda graph, momentum: AllReduce(), None, lends=True),
    Method("DSGD", lambda graph, momentum: Gossip(graph, "after"), _adapted_first, slow=True),
    Method("DmSGD", lambda graph, momentum: Gossip(graph, "after"), lambda w, b: w / (1 - b), lends=True),
    Method("AWC-DmSGD", lambda graph, momentum: Gossip(graph), lambda w, b: np.eye(len(w)) / (1 - b), lends=True),
    Method("DA-DmSGD", DoubleAveraging, _doubly_averaged),
    Method("QG-DmSGD", QuasiGlobal, _adapted_first),
    Method("DecentLaM", DecentLaM, _adapted_first),
    Method("EDM", ExactDiffusion, None, slow=True),
)
