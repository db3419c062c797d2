"""Stochastic gradient descent of an array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.errors import ConfigError
from thinwire.fusion.optimizers.base import FusedOptimizer, Numbers
from thinwire.fusion.optimizers.parameter_batch import Group, ParameterBatch, in_rows
from thinwire.fusion.optimizers.vectors import Coefficient, add_, plus, scale_
from thinwire.kernels.rows import sgd_rows_


class SGD(FusedOptimizer):
    r"""`torch.optim.SGD` of every model, with its own hyperparameters.

    $$g \leftarrow g + \lambda x, \qquad u \leftarrow \mu u + (1-\delta) g, \qquad x \leftarrow x - \gamma u,$$

    where the first step has $u = g$, and Nesterov's momentum moves by $g + \mu u$ instead of $u$.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        momentum: $\mu$, likewise; more remembers longer.
        dampening: $\delta$, likewise.
        weight_decay: $\lambda$, likewise.
        nesterov: True, False, or one per model.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, not one per model, or Nesterov's momentum without momentum.
    """

    ranges = {  # noqa: RUF012
        "lr": (0.0, inf),
        "momentum": (0.0, inf),
        "dampening": (-inf, inf),
        "weight_decay": (0.0, inf),
        "nesterov": (0.0, 2.0),
    }
    kept = ("momentum_buffer",)
    genuine = torch.optim.SGD

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[Group],
        lr: Numbers = 1e-3,
        momentum: Numbers = 0.0,
        dampening: Numbers = 0.0,
        weight_decay: Numbers = 0.0,
        nesterov: bool | Sequence[bool] = False,
        *,
        models: int | None = None,
    ) -> None:
        values = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**values, "nesterov": nesterov}, {}, models=models)
        for group in self.param_groups:
            wrong = (group["nesterov"] > 0) & ((group["momentum"] <= 0) | (group["dampening"] != 0))
            if bool(wrong.any()):
                model = int(wrong.nonzero()[0])
                raise ConfigError(f"nesterov of model {model}: needs momentum above 0 and dampening 0")

    def by_rows(self, handful: ParameterBatch) -> bool:
        """On a CPU."""
        return in_rows(handful)

    def move_rows(self, handful: ParameterBatch, active: Tensor) -> None:
        """By a kernel of our own; a model without momentum keeps none."""
        v = handful.values
        take = torch.where(handful.steps == 1, 1.0, 1 - v["dampening"])
        numbers = torch.stack([v["weight_decay"], v["momentum"], take, v["nesterov"], v["lr"]], 1)
        every = zip(handful.parameters, handful.gradients, handful.states["momentum_buffer"], strict=True)
        for x, gradient, momentum in every:
            sgd_rows_(x, gradient.contiguous(), momentum, numbers=numbers, going=active)

    def move(self, handful: ParameterBatch) -> None:
        """All models at once; one without momentum keeps its gradient as its momentum."""
        values, buffers = handful.values, handful.states["momentum_buffer"]
        gradients = plus(handful.gradients, handful.parameters, Coefficient(values["weight_decay"]))
        first = (handful.steps == 1) | (values["momentum"] == 0)
        scale_(buffers, Coefficient(values["momentum"]))
        add_(buffers, gradients, Coefficient(torch.where(first, 1.0, 1 - values["dampening"])))
        # d = (1 - n) u + n (g + mu u)
        ahead = values["nesterov"]
        directions = plus(buffers, buffers, Coefficient(ahead * (values["momentum"] - 1)))
        add_(directions, gradients, Coefficient(ahead))
        moving = directions if bool(ahead.any()) else buffers
        add_(handful.parameters, moving, Coefficient(-values["lr"]))

    def options(self, values: dict[str, float], group: Group) -> dict[str, Any]:
        """As torch's SGD takes them."""
        return {**values, "nesterov": bool(values["nesterov"])}

    def extract(self, index: int) -> dict[str, Any]:
        """One model's state as `torch.optim.SGD.state_dict` has it."""
        found = super().extract(index)
        for group in found["param_groups"]:
            for number in group["params"]:
                if number in found["state"] and not group["momentum"]:
                    found["state"][number]["momentum_buffer"] = None
        return found
