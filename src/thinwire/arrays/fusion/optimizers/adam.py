# SPDX-License-Identifier: Apache-2.0
"""Adam and AdamW of an array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer, Numbers, ranges_of
from thinwire.arrays.fusion.optimizers.parameter_batch import (
    Group,
    ParameterBatch,
    addcdiv_,
    addcmul_,
    divide_,
    is_zero,
    lerp_,
    scale_,
    shift_,
)
from thinwire.core.kernels.rows import adam_rows_
from thinwire.core.torch_internals import foreach


class Adam(FusedOptimizer):
    r"""`torch.optim.Adam` of every model, with its own hyperparameters.

    $$g \leftarrow g + \lambda x, \qquad m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2,$$

    $$x \leftarrow x - \frac{\gamma}{1-\beta_1^t} \frac{m}{\sqrt v / \sqrt{1-\beta_2^t} + \epsilon},$$

    with $t$ the slot's own number of steps. Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015,
    arXiv:1412.6980, Algorithm 1; AMSGrad: Reddi, Kale and Kumar, ICLR 2018, arXiv:1904.09237.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        betas: $\beta_1$ and $\beta_2$ in [0, 1), each a number or one per model; larger ones average longer.
        eps: $\epsilon$, likewise; a larger one bounds the steps of entries with small gradients.
        weight_decay: $\lambda$, likewise.
        amsgrad: divide by the largest $v$ so far; the same for all models.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import Adam, fuse
        >>> array = fuse([torch.nn.Linear(2, 1) for _ in range(3)])
        >>> optimizer = Adam(array.parameters(), lr=[1e-3, 1e-2, 1e-1], betas=(0.9, [0.99, 0.99, 0.9]))
        >>> optimizer.hyperparameters(2)
        {'lr': 0.1, 'beta1': 0.9, 'beta2': 0.9, 'eps': 1e-08, 'weight_decay': 0.0}
    """

    ranges = ranges_of("lr", "beta1", "beta2", "eps", "weight_decay")
    state_names = ("exp_avg", "exp_avg_sq")
    torch_class = torch.optim.Adam
    row_kernel = True
    decoupled: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-3,
        betas: tuple[Numbers, Numbers] = (0.9, 0.999),
        eps: Numbers = 1e-8,
        weight_decay: Numbers = 0.0,
        amsgrad: bool = False,
        *,
        models: int | None = None,
    ) -> None:
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, values, models=models, amsgrad=amsgrad)

    def state_names_of(self, group: Group) -> tuple[str, ...]:
        """Return the moments; with AMSGrad, the largest second moment too."""
        return (*self.state_names, "max_exp_avg_sq") if group["amsgrad"] else self.state_names

    def update_rows_(self, batch: ParameterBatch, active: Tensor) -> None:
        """Update by a kernel that takes numbers per model; torch's fused Adam takes one of each."""
        v, states, steps = batch.values, batch.states, batch.steps
        zero, pull = torch.zeros_like(steps), v["lr"] * v["weight_decay"]
        shrink, decay = (1 - pull, zero) if self.decoupled else (1 - zero, v["weight_decay"])
        # All in float64: the kernel rounds each number once, as torch does for its Python numbers.
        scale, rate = (1 - v["beta2"] ** steps).rsqrt(), v["lr"] / (1 - v["beta1"] ** steps)
        columns = [shrink, decay, 1 - v["beta1"], v["beta1"], v["beta2"], 1 - v["beta2"], scale, v["eps"], rate]
        numbers = torch.stack(columns, 1)
        largest = states.get("max_exp_avg_sq", [None] * len(batch.parameters))
        moments = zip(states["exp_avg"], states["exp_avg_sq"], largest, strict=True)
        for x, gradient, (mean, square, most) in zip(batch.parameters, batch.gradients, moments, strict=True):
            adam_rows_(x, gradient.contiguous(), mean, square, most, numbers=numbers, active=active)

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once by torch's own formula."""
        v, states, steps, gradients = batch.values, batch.states, batch.steps, batch.gradients
        if not self.decoupled:
            gradients = batch.decayed_gradients()
        elif not is_zero(v["weight_decay"]):
            scale_(batch.parameters, 1 - v["lr"] * v["weight_decay"])
        moments, squares = states["exp_avg"], states["exp_avg_sq"]
        lerp_(moments, gradients, 1 - v["beta1"])
        scale_(squares, v["beta2"])
        addcmul_(squares, gradients, gradients, 1 - v["beta2"])
        if batch.group["amsgrad"]:
            foreach.maximum_(states["max_exp_avg_sq"], squares)
            squares = states["max_exp_avg_sq"]
        denominators = list(foreach.sqrt(squares))
        divide_(denominators, (1 - v["beta2"] ** steps).sqrt())
        shift_(denominators, v["eps"])
        addcdiv_(batch.parameters, moments, denominators, -v["lr"] / (1 - v["beta1"] ** steps))


class AdamW(Adam):
    r"""`torch.optim.AdamW` of every model: `Adam` with weight decay that does not enter the gradient.

    $x \leftarrow (1 - \gamma\lambda) x$ before the step. Loshchilov and Hutter, Decoupled Weight Decay Regularization,
    ICLR 2019, arXiv:1711.05101, Algorithm 2.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        betas: as Adam's.
        eps: as Adam's.
        weight_decay: $\lambda$; a number, or one per model.
        amsgrad: as Adam's.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.
    """

    torch_class = torch.optim.AdamW
    decoupled = True

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-3,
        betas: tuple[Numbers, Numbers] = (0.9, 0.999),
        eps: Numbers = 1e-8,
        weight_decay: Numbers = 1e-2,
        amsgrad: bool = False,
        *,
        models: int | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, models=models)
