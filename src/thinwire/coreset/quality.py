"""How well a coreset represents all points, compared with random subsets of the same size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.coreset.methods import unit_of
from thinwire.coreset.similarity import Features, centred, checked
from thinwire.coreset.sparse import nearest_of_many
from thinwire.coreset.subset import Coreset

_SAMPLE = 20_000
_MODELS = 8


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
    draws = torch.Generator().manual_seed(seed)
    sample = torch.randperm(len(rows), generator=draws)[:_SAMPLE]
    unit = unit_of(rows)
    near = torch.cat([nearest_of_many(part / unit, rows[indices] / unit)[0] for part in rows[sample].split(4096)])
    near = near.double() * unit
    return Quality(
        mean_distance=float(near.mean()),
        far_distance=float(near.kthvalue(max(1, round(0.95 * len(near)))).values),
        largest_distance=float(near.max()),
        gradient_error=_gradient_error(rows, indices, weights, labels, draws),
    )


def random_subset(n: int, budget: int, *, labels: Tensor | None, like: Coreset, seed: int) -> tuple[Tensor, Tensor]:
    """Random points, as many as a coreset has, per class where there are labels, with equal weights within a class."""
    draws = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=draws)
    if labels is None:
        return order[:budget], torch.full((budget,), n / budget, dtype=torch.float64)
    chosen: list[Tensor] = []
    weights: list[Tensor] = []
    for label in labels.unique():
        count = int((labels[like.indices] == label).sum())
        members = order[labels[order] == label]
        chosen.append(members[:count])
        weights.append(torch.full((count,), len(members) / max(count, 1), dtype=torch.float64))
    return torch.cat(chosen), torch.cat(weights)


def _gradient_error(
    rows: Tensor, indices: Tensor, weights: Tensor, labels: Tensor | None, draws: torch.Generator
) -> float:
    # Constant columns, which all are where there is one point, have no deviation to divide by but that of rounding.
    deviation = rows.std(0, correction=min(1, len(rows) - 1))
    constant = deviation <= 1e-6 * rows.abs().amax(0)
    x = torch.where(constant, 0.0, rows / torch.where(constant, 1.0, deviation))
    everything = torch.ones(len(rows), dtype=torch.float64)
    errors: list[float] = []
    for _ in range(_MODELS):
        outputs = 1 if labels is None else int(labels.max()) + 1
        model = torch.randn(rows.shape[1], outputs, generator=draws) / rows.shape[1] ** 0.5
        truth = _gradient(x, everything, labels, model)
        estimate = _gradient(x[indices], weights, None if labels is None else labels[indices], model)
        errors.append(float((truth - estimate).norm() / truth.norm().clamp_min(1e-300)))
    return sum(errors) / len(errors)


def _gradient(x: Tensor, weights: Tensor, labels: Tensor | None, model: Tensor) -> Tensor:
    """The weighted sum of gradients with respect to the model, float64 [d, outputs]."""
    total = torch.zeros(model.shape, dtype=torch.float64)
    for start in range(0, len(x), 1 << 16):
        part = slice(start, start + (1 << 16))
        logits = x[part] @ model
        slopes = logits.tanh() if labels is None else logits.softmax(1)
        if labels is not None:
            slopes[torch.arange(len(slopes)), labels[part]] -= 1
        total += x[part].double().T @ (slopes.double() * weights[part, None])
    return total
