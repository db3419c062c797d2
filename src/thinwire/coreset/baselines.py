# SPDX-License-Identifier: Apache-2.0
"""Other policies to compare Craig with; `Random` is the one to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.coreset.policy import Points, Policy
from thinwire.coreset.proxies import LastLayer
from thinwire.coreset.selection import proportional_budgets, select
from thinwire.coreset.similarity import Distances, EuclideanDistances, distances_to
from thinwire.coreset.subset import Strata, Subset, budget_of, keyed, stratify
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Random(Policy):
    """Random points, all with the same weight.

    With `every=1` this is training on all the data, spread over several epochs; with `every=None` on a random subset.
    """

    def choose(self, points: Points, seed: int) -> Subset:
        """Draw without replacement."""
        order = torch.randperm(points.n, generator=keyed(seed, 0x2A2D), device="cpu")
        return even(order[: budget_of(self.fraction, points.n)], points.n)


@dataclass(frozen=True)
class Stratified(Policy):
    """Random points, of each class its share; within a class all with the same weight."""

    def choose(self, points: Points, seed: int) -> Subset:
        """Draw from each class without replacement."""
        _, members, sizes = points.labels.unique(return_inverse=True, return_counts=True)
        given = proportional_budgets(sizes.tolist(), budget_of(self.fraction, points.n))
        return Strata(members, torch.tensor(given, dtype=torch.int64, device="cpu")).draw(seed)


@dataclass(frozen=True)
class KCenter(Policy):
    """Points such that every point is near one of them; the weights are the sizes of their clusters.

    The point farthest from those chosen is chosen next, which gives at most twice the least possible radius: Gonzalez,
    Clustering to Minimize the Maximum Intercluster Distance, 1985; for training, Sener and Savarese, Active Learning
    for Convolutional Neural Networks: A Core-Set Approach, ICLR 2018, arXiv:1708.00489.
    """

    def choose(self, points: Points, seed: int) -> Subset:
        """Compare logit gradients, starting with the first point."""
        distances = EuclideanDistances(points.gradients().residuals)
        return k_center(distances, budget_of(self.fraction, points.n))


@dataclass(frozen=True)
class El2n(Policy):
    """The points with the largest errors, by the length of $p - y$; all with the same weight.

    Paul, Ganguli and Dziugaite, Deep Learning on a Data Diet, NeurIPS 2021, arXiv:2107.07075. Their scores are means
    over several models early in training; here they are those of the run's own model.
    """

    def choose(self, points: Points, seed: int) -> Subset:
        """Take the highest scores."""
        return highest(points.gradients().norms(), budget_of(self.fraction, points.n))


@dataclass(frozen=True)
class Grand(Policy):
    """The points with the longest last-layer gradients; all with the same weight.

    Paul, Ganguli and Dziugaite, Deep Learning on a Data Diet, NeurIPS 2021, arXiv:2107.07075.
    """

    def choose(self, points: Points, seed: int) -> Subset:
        """Take the highest scores."""
        return highest(points.gradients(hidden=True).norms(), budget_of(self.fraction, points.n))


@dataclass(frozen=True)
class Crest(Policy):
    """Mini-batches that are each a coreset of a random part of the data, visited in that order.

    Facility location over a random part is cheap, and every batch has a part of its own, so that later batches cover
    what one leaves out. The rest of the method, a quadratic model that decides when to select again and the exclusion
    of points already learned, is not implemented: `every` decides.

    Yang, Kang and Mirzasoleiman, Towards Sustainable Learning: Coresets for Data-efficient Deep Learning, ICML 2023,
    arXiv:2306.01244.

    Args:
        fraction: of the points that an epoch visits, in (0, 1].
        every: epochs between selections; None selects once.
        batch: points of a mini-batch; use the loop's batch size.
        part: points among which each mini-batch is chosen.
    """

    batch: int = 32
    part: int = 320

    ordered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.batch <= self.part:
            raise ConfigError(f"batch={self.batch}: must lie in 1..{self.part}, the part that it is chosen from")

    def choose(self, points: Points, seed: int) -> Subset:
        """Select the mini-batches of the next epochs."""
        batches = max(1, round(budget_of(self.fraction, points.n) / self.batch))
        part = min(self.part, points.n)
        draw = keyed(seed, 0xC2E5)
        rows = torch.stack([torch.randperm(points.n, generator=draw, device="cpu")[:part] for _ in range(batches)])
        # Parts overlap, so each point is evaluated once for all of them.
        needed, place = rows.unique(return_inverse=True)
        gradients = points.gradients(needed)
        return minibatches(gradients, needed, place, size=min(self.batch, part), n=points.n)


def even(rows: Tensor, n: int) -> Subset:
    """These points, all with the same weight."""
    return Subset(rows, torch.full((len(rows),), n / len(rows), dtype=torch.float64, device="cpu"), n)


def highest(scores: Tensor, budget: int) -> Subset:
    """Return the points with the highest scores, the earlier first where they are equal; all with the same weight."""
    # A stable sort, so that all ranks choose the same of several equal points.
    order = scores.cpu().argsort(descending=True, stable=True)[:budget]
    return even(order, len(scores))


def k_center(distances: Distances, budget: int) -> Subset:
    """Farthest point first, starting with point 0, with cluster sizes as weights.

    Args:
        distances: between points.
        budget: points to choose; fewer are chosen where there are fewer distinct ones.
    """

    def apart(point: int) -> Tensor:
        return distances_to(distances, torch.tensor([point], dtype=torch.int64, device="cpu"))[:, 0]

    chosen, nearest = [0], apart(0)
    while len(chosen) < budget and float(nearest.max()) > 0:
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, apart(chosen[-1]))
    medoids = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    members = stratify(distances, medoids, len(chosen)).members
    return Subset(medoids, torch.bincount(members, minlength=len(chosen)).double(), distances.n)


def minibatches(gradients: LastLayer, numbers: Tensor, parts: Tensor, *, size: int, n: int) -> Subset:
    """Return a coreset of each part, one after the other.

    Args:
        gradients: of all points that are in a part.
        numbers: int64, [m]; the numbers of those points.
        parts: int64, [batches, part]; positions in `numbers`.
        size: points of each coreset.
        n: points in all.
    """
    indices: list[Tensor] = []
    weights: list[Tensor] = []
    for part in parts:
        found = select(gradients.at(part).residuals, budget=size)
        indices.append(numbers[part[found.indices.cpu()]])
        weights.append(found.weights.cpu().double())
    return Subset(torch.cat(indices), torch.cat(weights) * (n / parts.numel()), n)
