"""Adam and AdamW of an array."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from thinwire.fusion.optimizers.base import FusedOptimizer, Numbers
from thinwire.fusion.optimizers.parameter_batch import Group, ParameterBatch, Tensors, in_rows
from thinwire.fusion.optimizers.vectors import (
    Coefficient,
    add_product_,
    add_quotient_,
    divide_,
    plus,
    scale_,
    shift_,
    towards_,
)
from thinwire.kernels.rows import adam_rows_


class Adam(FusedOptimizer):
    r"""`torch.optim.Adam` of every model, with its own hyperparameters.

    $$g \leftarrow g + \lambda x, \qquad m \leftarrow \beta_1 m + (1-\beta_1) g, \qquad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2,$$

    $$x \leftarrow x - \frac{\gamma}{1-\beta_1^t} \frac{m}{\sqrt v / \sqrt{1-\beta_2^t} + \epsilon},$$

    with $t$ the slot's own age. Kingma and Ba, Adam: A Method for Stochastic Optimization, ICLR 2015, arXiv:1412.6980,
    Algorithm 1; AMSGrad: Reddi, Kale and Kumar, ICLR 2018, arXiv:1904.09237.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        betas: $\beta_1$ and $\beta_2$, each a number or one per model; more remembers longer.
        eps: $\epsilon$, likewise; more bounds the steps of entries with small gradients.
        weight_decay: $\lambda$, likewise.
        amsgrad: divide by the largest $v$ so far; the same for all models.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.
    """

    ranges = {  # noqa: RUF012
        "lr": (0.0, inf),
        "beta1": (0.0, 1.0),
        "beta2": (0.0, 1.0),
        "eps": (0.0, inf),
        "weight_decay": (0.0, inf),
    }
    kept = ("exp_avg", "exp_avg_sq")
    genuine = torch.optim.Adam
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
        super().__init__(params, values, {"amsgrad": amsgrad}, models=models)

    def names(self, group: Group) -> tuple[str, ...]:
        """With AMSGrad, the largest second moment too."""
        return (*self.kept, "max_exp_avg_sq") if group["amsgrad"] else self.kept

    def by_rows(self, handful: ParameterBatch) -> bool:
        """On a CPU."""
        return in_rows(handful)

    def move_rows(self, handful: ParameterBatch, active: Tensor) -> None:
        """By a kernel of our own: torch's fused one has one of each hyperparameter."""
        v, states, steps = handful.values, handful.states, handful.steps
        none, pull = torch.zeros_like(steps), v["lr"] * v["weight_decay"]
        shrink, decay = (1 - pull, none) if self.decoupled else (1 - none, v["weight_decay"])
        first, second = 1 - v["beta1"], 1 - v["beta2"]
        scale, rate = (1 - v["beta2"] ** steps).rsqrt(), v["lr"] / (1 - v["beta1"] ** steps)
        numbers = [shrink, decay, first, v["beta1"], v["beta2"], second, scale, v["eps"], rate]
        most = states.get("max_exp_avg_sq", [None] * len(handful.parameters))
        every = zip(handful.parameters, handful.gradients, states["exp_avg"], states["exp_avg_sq"], most, strict=True)
        every_number = torch.stack(numbers, 1)
        for x, gradient, mean, square, largest in every:
            adam_rows_(x, gradient.contiguous(), mean, square, largest, numbers=every_number, going=active)

    def move(self, handful: ParameterBatch) -> None:
        """All models at once, by torch's own formula."""
        v, states, steps = handful.values, handful.states, handful.steps
        gradients = self._decayed(handful)
        moments, squares = states["exp_avg"], states["exp_avg_sq"]
        towards_(moments, gradients, Coefficient(1 - v["beta1"]))
        scale_(squares, Coefficient(v["beta2"]))
        add_product_(squares, gradients, gradients, Coefficient(1 - v["beta2"]))
        if handful.group["amsgrad"]:
            torch._foreach_maximum_(states["max_exp_avg_sq"], squares)  # pyright: ignore
            squares = states["max_exp_avg_sq"]
        spreads = list(torch._foreach_sqrt(squares))  # pyright: ignore
        divide_(spreads, Coefficient((1 - v["beta2"] ** steps).sqrt()))
        shift_(spreads, Coefficient(v["eps"]))
        add_quotient_(handful.parameters, moments, spreads, Coefficient(-v["lr"] / (1 - v["beta1"] ** steps)))

    def _decayed(self, handful: ParameterBatch) -> Tensors:
        decay = handful.values["weight_decay"]
        if not bool(decay.any()):
            return handful.gradients
        if self.decoupled:
            scale_(handful.parameters, Coefficient(1 - handful.values["lr"] * decay))
            return handful.gradients
        return plus(handful.gradients, handful.parameters, Coefficient(decay))

    def options(self, values: dict[str, float], group: Group) -> dict[str, Any]:
        """As torch's Adam takes them."""
        return {**super().options(values, group), "amsgrad": group["amsgrad"]}


class AdamW(Adam):
    r"""`torch.optim.AdamW` of every model: as `Adam`, but weights decay apart from the gradient.

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

    genuine = torch.optim.AdamW
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
