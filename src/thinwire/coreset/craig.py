# SPDX-License-Identifier: Apache-2.0
"""Train on a few points whose weighted gradient approximates that of all."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire.core.validation import check_ranges
from thinwire.coreset.methods import Method
from thinwire.coreset.policy import Points, Policy
from thinwire.coreset.selection import select
from thinwire.coreset.similarity import Distances, EuclideanDistances
from thinwire.coreset.subset import Strata, Subset, budget_of, keyed, stratify
from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Craig(Policy):
    r"""Visit the medoids of clusters in gradient space, each weighted by the size of its cluster.

    The subset $S$ maximises facility location over gradient distances $d_{ij}$; $\gamma_j$ counts the points nearest to
    $j$. If these distances bound those between gradients,

    $$|\sum_{i\in V}\nabla f_i(w) - \sum_{j\in S}\gamma_j\nabla f_j(w)| \le \sum_{i\in V}\min_{j\in S} d_{ij}.$$

    `fraction=1` is training on all the data. The estimate is biased; `mode="strata"` instead draws points from the
    clusters of half as many medoids in every epoch, which is unbiased.

    Cost: one forward pass over all points for the proxies (`proxy="features"`: none), and the selection, every `every`
    epochs.

    Mirzasoleiman, Bilmes and Leskovec, Coresets for Data-efficient Training of Machine Learning Models, ICML 2020,
    arXiv:1906.01827, Algorithm 1.

    Example:
        >>> from torch import nn
        >>> from thinwire.coreset import Selector
        >>> x, y = torch.tensor([[0.0], [0.1], [5.0], [5.1], [5.2]]), torch.zeros(5, dtype=torch.int64)
        >>> points = Points(lambda rows: (x[rows], y[rows]), y, nn.Linear(1, 2))
        >>> subset = Selector(Craig(fraction=0.4, every=None, proxy="features"), points).subset(epoch=0)
        >>> subset.indices.tolist(), subset.weights.tolist()
        ([2, 0], [3.0, 2.0])

    Args:
        fraction: of the points that an epoch visits, in (0, 1].
        full_epochs: epochs on all the data before the first selection.
        every: $R$, epochs between selections; None selects once, which is right for `proxy="features"`.
        proxy: what approximates gradients: "features" (convex losses of linear models), "logits" (the gradient with
            respect to the logits) or "last_layer" (the gradient of the whole last layer).
        mode: "medoid", or "strata" for unbiased draws from clusters.
        method: of `thinwire.coreset.select`.
        per_class: select in each class separately.
        preconditioned: compare gradients after Adam's scaling.
        bound: also select again when the relative error of the subset's gradient exceeds this; 0.3 is usual.
        probe: the fraction of the points on which the error is measured.
    """

    fraction: float = 0.1
    every: int | None = 5
    proxy: Literal["features", "logits", "last_layer"] = "logits"
    mode: Literal["medoid", "strata"] = "medoid"
    method: Method = "lazy"
    per_class: bool = True
    preconditioned: bool = False
    bound: float | None = None
    probe: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self, bound=("(0, inf)", "0.3 is usual"), probe=("(0, 1]", "0.1 is usual"))
        if self.proxy == "last_layer" and self.method == "sparse":
            raise ConfigError(
                f"method={self.method!r} with proxy='last_layer': needs coordinates, and these gradients have none. "
                "Use 'lazy', or proxy='logits'"
            )
        if self.preconditioned and self.proxy == "features":
            raise ConfigError("preconditioned=True with proxy='features': features are no gradients. Use 'logits'")

    def choose(self, points: Points, seed: int) -> Subset | Strata:
        """Select by facility location."""
        budget = budget_of(self.fraction, points.n)
        labels = points.labels if self.per_class else None
        if self.proxy == "features":
            return self._by(points.features, labels, budget, seed)
        hidden = self.proxy == "last_layer"
        moments = points.moments(hidden=hidden) if self.preconditioned else None
        gradients = points.gradients(hidden=hidden)
        if moments is not None:
            gradients = gradients.preconditioned(moments)
        # Logit gradients are short rows, so plain Euclidean distances do. Outer products would be too long to store.
        across = gradients.residuals if gradients.hidden is None else gradients.distances()
        return self._by(across, labels, budget, seed)

    def has_drifted(self, points: Points, chosen: Subset, seed: int) -> bool:
        """Return True if the relative gradient error on a probe exceeds the bound."""
        return self.bound is not None and self.error(points, chosen, seed) > self.bound

    def error(self, points: Points, chosen: Subset, seed: int) -> float:
        """Return the relative error of the subset's gradient, compared with that of a random part of all points.

        This includes the noise of the random part, of order 1/sqrt(probe n) of a single gradient's length.
        """
        count = budget_of(self.probe, points.n)
        probe = torch.randperm(points.n, generator=keyed(seed, 0xE220), device="cpu")[:count].sort().values
        rows = torch.cat([probe, chosen.indices])
        gradients = points.gradients(rows, hidden=self.proxy != "logits")
        whole = gradients.at(torch.arange(count, device="cpu")).total() * (points.n / count)
        part = gradients.at(torch.arange(count, len(rows), device="cpu")).total(chosen.weights)
        return float((whole - part).norm() / whole.norm())

    def _by(self, across: Tensor | Distances, labels: Tensor | None, budget: int, seed: int) -> Subset | Strata:
        chosen = partial(select, across, labels=labels, method=self.method, seed=seed)
        if self.mode == "medoid":
            return Subset.of(chosen(budget=budget))
        # Half as many medoids as draws; every class needs one.
        least = 1 if labels is None else len(labels.unique())
        medoids = chosen(budget=min(budget, max(budget // 2, least))).indices
        distances = EuclideanDistances(across) if isinstance(across, Tensor) else across
        return stratify(distances, medoids, budget, labels=labels)
