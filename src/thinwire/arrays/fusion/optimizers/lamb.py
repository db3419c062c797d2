# SPDX-License-Identifier: Apache-2.0
"""LAMB of an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer, Numbers, ranges_of
from thinwire.arrays.fusion.optimizers.parameter_batch import (
    Group,
    ParameterBatch,
    add_,
    addcmul_,
    divide_,
    lerp_,
    scale_,
    shift_,
)
from thinwire.arrays.fusion.store import column, rows_of
from thinwire.core.torch_internals import foreach


class LAMB(FusedOptimizer):
    r"""LAMB of every model: Adam's direction, scaled in proportion to the norm of each of the model's tensors.

    $$m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad v \leftarrow \beta_2 v + (1-\beta_2) g^2, \qquad
      u = \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \epsilon} + \lambda x,$$

    $$x \leftarrow x - \gamma \min(\max(|x|/|u|, c_{min}), c_{max})\, u,$$

    where the ratio is 1 if either norm is zero. You et al., Large Batch Optimization for Deep Learning:
    Training BERT in 76 Minutes, ICLR 2020, arXiv:1904.00962, Algorithm 2.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        betas: $\beta_1$ and $\beta_2$, each a number or one per model.
        eps: $\epsilon$, likewise.
        weight_decay: $\lambda$, likewise.
        least_trust: $c_{min}$, likewise.
        most_trust: $c_{max}$, likewise.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import LAMB, fuse
        >>> array = fuse([torch.nn.Linear(2, 1) for _ in range(2)])
        >>> LAMB(array.parameters(), lr=[0.01, 0.02]).hyperparameters(1)["lr"]
        0.02
    """

    ranges = ranges_of("lr", "beta1", "beta2", "eps", "weight_decay", "least_trust", "most_trust")
    state_names = ("momentum", "variance")

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-3,
        betas: tuple[Numbers, Numbers] = (0.9, 0.999),
        eps: Numbers = 1e-8,
        weight_decay: Numbers = 0.0,
        least_trust: Numbers = 0.01,
        most_trust: Numbers = 10.0,
        *,
        models: int | None = None,
    ) -> None:
        values: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**values, "least_trust": least_trust, "most_trust": most_trust}, models=models)

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once."""
        v, steps, gradients = batch.values, batch.steps, batch.gradients
        momenta, variances = batch.states["momentum"], batch.states["variance"]
        lerp_(momenta, gradients, 1 - v["beta1"])
        scale_(variances, v["beta2"])
        addcmul_(variances, gradients, gradients, 1 - v["beta2"])
        denominators, directions = ([tensor.clone() for tensor in tensors] for tensors in (variances, momenta))
        divide_(denominators, 1 - v["beta2"] ** steps)
        foreach.sqrt_(denominators)
        shift_(denominators, v["eps"])
        divide_(directions, 1 - v["beta1"] ** steps)
        foreach.div_(directions, denominators)
        add_(directions, batch.parameters, v["weight_decay"])
        for parameter, direction in zip(batch.parameters, directions, strict=True):
            direction.mul_(column(_trust_ratios(parameter, direction, v), parameter))
        add_(batch.parameters, directions, -v["lr"])


def _trust_ratios(parameter: Tensor, direction: Tensor, values: dict[str, Tensor]) -> Tensor:
    """Return each model's trust ratio for one tensor, [models]."""
    own, step = (torch.linalg.vector_norm(rows_of(tensor), dim=1) for tensor in (parameter, direction))
    least, most = (values[name].to(own) for name in ("least_trust", "most_trust"))
    bounded = torch.minimum(torch.maximum(own / step, least), most)
    return torch.where((own > 0) & (step > 0), bounded, torch.ones_like(bounded))
