# SPDX-License-Identifier: Apache-2.0
"""Adagrad, RMSprop and Adadelta of an array."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer, Numbers, ranges_of
from thinwire.arrays.fusion.optimizers.parameter_batch import (
    Group,
    ParameterBatch,
    add_,
    addcdiv_,
    addcmul_,
    is_zero,
    lerp_,
    scale_,
    shift_,
)
from thinwire.arrays.fusion.store import column
from thinwire.core.torch_internals import foreach


class Adagrad(FusedOptimizer):
    r"""`torch.optim.Adagrad` of every model, with its own hyperparameters.

    $$s \leftarrow s + g^2, \qquad x \leftarrow x - \frac{\gamma}{1 + (t-1)\eta} \frac{g}{\sqrt s + \epsilon}$$

    with weight decay in $g$. Duchi, Hazan and Singer, Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization, JMLR 12, 2011, Figure 1.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        lr_decay: $\eta$, likewise.
        weight_decay: likewise.
        initial_accumulator_value: $s$ before the first step, likewise; a larger one makes the first steps smaller.
        eps: $\epsilon$, likewise.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.
    """

    ranges = ranges_of("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    state_names = ("sum",)
    torch_class = torch.optim.Adagrad

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-2,
        lr_decay: Numbers = 0.0,
        weight_decay: Numbers = 0.0,
        initial_accumulator_value: Numbers = 0.0,
        eps: Numbers = 1e-10,
        *,
        models: int | None = None,
    ) -> None:
        values = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, {**values, "initial_accumulator_value": initial_accumulator_value}, models=models)

    def initial_state(self, name: str, parameter: Tensor, group: Group, slots: slice) -> Tensor:
        """Return each model's initial sum."""
        return torch.zeros_like(parameter) + column(group["initial_accumulator_value"][slots].to(parameter), parameter)

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once by torch's own formula."""
        v, sums, gradients = batch.values, batch.states["sum"], batch.decayed_gradients()
        addcmul_(sums, gradients, gradients, torch.ones_like(v["lr"]))
        denominators = list(foreach.sqrt(sums))
        shift_(denominators, v["eps"])
        rate = v["lr"] / (1 + (batch.steps - 1) * v["lr_decay"])
        addcdiv_(batch.parameters, gradients, denominators, -rate)


class RMSprop(FusedOptimizer):
    r"""`torch.optim.RMSprop` of every model, with its own hyperparameters.

    $$v \leftarrow \alpha v + (1-\alpha) g^2, \qquad u \leftarrow \mu u + \frac{g}{\sqrt v + \epsilon}, \qquad
      x \leftarrow x - \gamma u;$$

    if centred, the square of the mean gradient is subtracted from $v$. Tieleman and Hinton, Lecture 6.5, Neural
    Networks for Machine Learning, 2012; centred: Graves, arXiv:1308.0850.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        alpha: $\alpha$, likewise; a larger one averages longer.
        eps: $\epsilon$, likewise.
        weight_decay: added to the gradient, likewise.
        momentum: $\mu$, likewise.
        centered: divide by the standard deviation; the same for all models.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.
    """

    ranges = ranges_of("lr", "alpha", "eps", "weight_decay", "momentum")
    state_names = ("square_avg", "momentum_buffer")
    torch_class = torch.optim.RMSprop

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-2,
        alpha: Numbers = 0.99,
        eps: Numbers = 1e-8,
        weight_decay: Numbers = 0.0,
        momentum: Numbers = 0.0,
        centered: bool = False,
        *,
        models: int | None = None,
    ) -> None:
        values = {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, values, models=models, centered=centered)

    def state_names_of(self, group: Group) -> tuple[str, ...]:
        """Return the states; if centred, the mean gradient too."""
        return (*self.state_names, "grad_avg") if group["centered"] else self.state_names

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once by torch's own formula."""
        v, states, gradients = batch.values, batch.states, batch.decayed_gradients()
        scale_(states["square_avg"], v["alpha"])
        addcmul_(states["square_avg"], gradients, gradients, 1 - v["alpha"])
        squares = states["square_avg"]
        if batch.group["centered"]:
            lerp_(states["grad_avg"], gradients, 1 - v["alpha"])
            squares = list(foreach.addcmul(squares, states["grad_avg"], states["grad_avg"], -1))
        denominators = list(foreach.sqrt(squares))
        shift_(denominators, v["eps"])
        if is_zero(v["momentum"]):
            addcdiv_(batch.parameters, gradients, denominators, -v["lr"])
            return
        scale_(states["momentum_buffer"], v["momentum"])
        addcdiv_(states["momentum_buffer"], gradients, denominators, torch.ones_like(v["lr"]))
        add_(batch.parameters, states["momentum_buffer"], -v["lr"])


class Adadelta(FusedOptimizer):
    r"""`torch.optim.Adadelta` of every model, with its own hyperparameters.

    $$v \leftarrow \rho v + (1-\rho) g^2, \qquad \Delta = \frac{\sqrt{a + \epsilon}}{\sqrt{v + \epsilon}}\, g, \qquad
      a \leftarrow \rho a + (1-\rho) \Delta^2, \qquad x \leftarrow x - \gamma \Delta .$$

    Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012, arXiv:1212.5701, Algorithm 1.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        rho: $\rho$, likewise; a larger one averages longer.
        eps: $\epsilon$, likewise; a larger one makes the first steps larger.
        weight_decay: added to the gradient, likewise.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, or not one per model.
    """

    ranges = ranges_of("lr", "rho", "eps", "weight_decay")
    state_names = ("square_avg", "acc_delta")
    torch_class = torch.optim.Adadelta

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1.0,
        rho: Numbers = 0.9,
        eps: Numbers = 1e-6,
        weight_decay: Numbers = 0.0,
        *,
        models: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay}, models=models)

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once by torch's own formula."""
        v, states, gradients = batch.values, batch.states, batch.decayed_gradients()
        scale_(states["square_avg"], v["rho"])
        addcmul_(states["square_avg"], gradients, gradients, 1 - v["rho"])
        denominators, deltas = ([tensor.clone() for tensor in states[name]] for name in self.state_names)
        for tensors in (denominators, deltas):
            shift_(tensors, v["eps"])
            foreach.sqrt_(tensors)
        foreach.div_(deltas, denominators)
        foreach.mul_(deltas, gradients)
        scale_(states["acc_delta"], v["rho"])
        addcmul_(states["acc_delta"], deltas, deltas, 1 - v["rho"])
        add_(batch.parameters, deltas, -v["lr"])
