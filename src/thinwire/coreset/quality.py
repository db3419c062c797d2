# SPDX-License-Identifier: Apache-2.0
"""How well a coreset represents all points, compared with random subsets of the same size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.coreset.facility import unit_of
from thinwire.coreset.similarity import Features, centred, checked
from thinwire.coreset.sparse import nearest_of_many
from thinwire.coreset.subset import Coreset, Strata

_SAMPLE = 20_000
_MODELS = 8
_WEIGHT_DECAY = 1e-4


@dataclass(frozen=True)
class Quality:
    """The errors of a selection; less is better.

    Args:
        mean_distance: mean distance of a point to its nearest chosen one.
        far_distance: the 95th percentile of these distances.
        largest_distance: the largest of them.
        gradient_error: relative error of the weighted gradient over the chosen, at random models.
    """

    mean_distance: float
    far_distance: float
    largest_distance: float
    gradient_error: float


def quality(
    features: Features, indices: Tensor, weights: Tensor, *, labels: Tensor | None = None, seed: int = 0
) -> Quality:
    r"""Measure a weighted subset.

    Distances are measured for all points, or for 20,000 random ones. Gradients are $\sum_i\gamma_i\nabla f_i(w)$ of a
    linear model on standardised features, averaged over 8 random w: with labels of softmax regression, without of
    $f_i(w)=\log\cosh(w^\top x_i)$.

    Args:
        features: [n, d].
        indices: int64, [k]; the chosen points.
        weights: float64, [k].
        labels: int64, [n]; classes from 0.
        seed: of the draws of points and models.

    Raises:
        ConfigError: the features are invalid.
    """
    rows = centred(checked(features)).cpu()
    indices, weights, labels = indices.cpu(), weights.cpu(), None if labels is None else labels.cpu()
    draws = torch.Generator().manual_seed(seed)
    sample = torch.randperm(len(rows), generator=draws, device="cpu")[:_SAMPLE]
    unit = unit_of(rows)
    near = torch.cat([nearest_of_many(part / unit, rows[indices] / unit)[0] for part in rows[sample].split(4096)])
    near = near.double() * unit
    return Quality(
        mean_distance=float(near.mean()),
        far_distance=float(near.kthvalue(max(1, round(0.95 * len(near)))).values),
        largest_distance=float(near.max()),
        gradient_error=_gradient_error(rows, indices, weights, labels, draws),
    )


def optimum_gaps(
    features: Features, labels: Tensor, subsets: Sequence[tuple[Tensor, Tensor]], *, seed: int = 0
) -> list[float]:
    r"""How far from the optimum of all points training on each subset alone can come at best.

    Softmax regression on standardised features, with a little weight decay, is solved on every weighted subset and on
    all points (on 20,000 random ones, where there are more). With $F$ the loss of these points,

    $$\frac{F(w_S) - F(w^*)}{F(0) - F(w^*)}, \qquad w_S = \arg\min_w \sum_{i \in S} \gamma_i f_i(w) ,$$

    is 0 where the subset's own optimum is that of all points, and 1 where it is no better than the start.

    Args:
        features: [n, d].
        labels: int64, [n]; classes from 0.
        subsets: of each, the chosen points, int64 [k], and their weights, float64 [k].
        seed: of the draw of points.

    Raises:
        ConfigError: the features are invalid.

    Example:
        >>> import torch
        >>> draw = torch.Generator().manual_seed(0)
        >>> x = torch.randn(60, 2, generator=draw)
        >>> labels = (x[:, 0] + torch.randn(60, generator=draw) > 0).long()
        >>> everything = (torch.arange(60), torch.ones(60, dtype=torch.float64))
        >>> few = (torch.arange(6), torch.full((6,), 10.0, dtype=torch.float64))
        >>> own, worse = optimum_gaps(x, labels, [everything, few])
        >>> own < 1e-6 < worse
        True
    """
    x = _standardised(centred(checked(features)).cpu())
    x, labels = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float32, device="cpu")], 1), labels.cpu()
    subsets = [(indices.cpu(), weights.cpu()) for indices, weights in subsets]
    classes = int(labels.max()) + 1
    sample = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")[:_SAMPLE]
    whole, theirs = x[sample], labels[sample]
    ones = torch.ones(len(sample), dtype=torch.float32, device="cpu")

    def loss(model: Tensor) -> float:
        return float(_softmax_loss(model, whole, theirs, ones))

    optimum = _solved(whole, theirs, ones, classes)
    start, best = loss(torch.zeros_like(optimum)), loss(optimum)
    gaps: list[float] = []
    for indices, weights in subsets:
        model = _solved(x[indices], labels[indices], (weights / weights.mean()).float(), classes)
        gaps.append((loss(model) - best) / max(start - best, 1e-300))
    return gaps


def _solved(x: Tensor, labels: Tensor, weights: Tensor, classes: int) -> Tensor:
    """Return the optimum of weighted softmax regression from zero, by L-BFGS: [d, classes]."""
    model = torch.zeros(x.shape[1], classes, requires_grad=True, dtype=torch.float32, device="cpu")
    optimizer = torch.optim.LBFGS([model], max_iter=100, history_size=10, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        found = _softmax_loss(model, x, labels, weights)
        found.backward()  # pyright: ignore[reportUnknownMemberType]
        return found

    optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return model.detach()


def _softmax_loss(model: Tensor, x: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    losses = torch.nn.functional.cross_entropy(x @ model, labels, reduction="none")
    return (losses * weights).mean() + _WEIGHT_DECAY / 2 * model.square().sum()


def random_subset(like: Coreset, *, labels: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    """Random points, as many as a coreset has, per class where there are labels, with equal weights within a class."""
    one = torch.zeros(like.n, dtype=torch.int64, device="cpu")
    members = one if labels is None else labels.cpu().unique(return_inverse=True)[1]
    found = Strata(members, members[like.indices].bincount()).draw(seed)
    return found.indices, found.weights


def _gradient_error(
    rows: Tensor, indices: Tensor, weights: Tensor, labels: Tensor | None, draws: torch.Generator
) -> float:
    x = _standardised(rows)
    everything = torch.ones(len(rows), dtype=torch.float64, device="cpu")
    errors: list[float] = []
    for _ in range(_MODELS):
        outputs = 1 if labels is None else int(labels.max()) + 1
        model = torch.randn(rows.shape[1], outputs, generator=draws, dtype=torch.float32, device="cpu")
        model /= rows.shape[1] ** 0.5
        truth = _gradient(x, everything, labels, model)
        estimate = _gradient(x[indices], weights, None if labels is None else labels[indices], model)
        errors.append(float((truth - estimate).norm() / truth.norm().clamp_min(1e-300)))
    return sum(errors) / len(errors)


def _standardised(rows: Tensor) -> Tensor:
    """Return every column with deviation 1; zero where it is constant."""
    # Constant columns, which all are where there is one point, have no deviation to divide by but that of rounding.
    deviation = rows.std(0, correction=min(1, len(rows) - 1))
    constant = deviation <= 1e-6 * rows.abs().amax(0)
    return torch.where(constant, 0.0, rows / torch.where(constant, 1.0, deviation))


def _gradient(x: Tensor, weights: Tensor, labels: Tensor | None, model: Tensor) -> Tensor:
    """Return the weighted sum of gradients with respect to the model, float64 [d, outputs]."""
    total = torch.zeros(model.shape, dtype=torch.float64, device="cpu")
    for start in range(0, len(x), 1 << 16):
        part = slice(start, start + (1 << 16))
        logits = x[part] @ model
        slopes = logits.tanh() if labels is None else logits.softmax(1)
        if labels is not None:
            slopes[torch.arange(len(slopes), device="cpu"), labels[part]] -= 1
        total += x[part].double().T @ (slopes.double() * weights[part, None])
    return total
