# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent of an array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.arrays.fusion.optimizers.base import FusedOptimizer, Numbers, ranges_of
from thinwire.arrays.fusion.optimizers.parameter_batch import Group, ParameterBatch, add_, is_zero, plus, scale_
from thinwire.core.kernels.rows import sgd_rows_
from thinwire.errors import ConfigError


class SGD(FusedOptimizer):
    r"""`torch.optim.SGD` of every model, with its own hyperparameters.

    $$g \leftarrow g + \lambda x, \qquad u \leftarrow \mu u + (1-\delta) g, \qquad x \leftarrow x - \gamma u,$$

    with $u = g$ in the first step; Nesterov's momentum steps along $g + \mu u$ instead of $u$.

    Args:
        params: an array's parameters, or groups of them.
        lr: $\gamma$; a number, or one per model.
        momentum: $\mu$, likewise; a larger one averages longer.
        dampening: $\delta$, likewise.
        weight_decay: $\lambda$, likewise.
        nesterov: True, False, or one per model.
        models: the number of models; None finds it from the parameters.

    Raises:
        ConfigError: a value out of its range, not one per model, or Nesterov's momentum without momentum.

    Example:
        >>> import torch
        >>> from thinwire.arrays.fusion import SGD, fuse
        >>> array = fuse([torch.nn.Linear(1, 1, bias=False) for _ in range(2)])
        >>> optimizer = SGD(array.parameters(), lr=[0.1, 0.2])
        >>> before = next(array.parameters()).detach().clone()
        >>> array.losses(torch.mean, array(torch.ones(1, 1))).sum().backward()
        >>> optimizer.step()
        >>> [round(step, 6) for step in (before - next(array.parameters())).flatten().tolist()]
        [0.1, 0.2]
    """

    ranges = ranges_of("lr", "momentum", "dampening", "weight_decay", "nesterov")
    state_names = ("momentum_buffer",)
    torch_class = torch.optim.SGD
    row_kernel = True

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
        super().__init__(params, {**values, "nesterov": nesterov}, models=models)
        for group in self.param_groups:
            wrong = (group["nesterov"] > 0) & ((group["momentum"] <= 0) | (group["dampening"] != 0))
            if bool(wrong.any()):
                model = int(wrong.nonzero()[0])
                raise ConfigError(f"nesterov of model {model}: needs momentum above 0 and dampening 0")

    def update_rows_(self, batch: ParameterBatch, active: Tensor) -> None:
        """Update by a kernel; it leaves the momentum of models without momentum at zero."""
        v = batch.values
        fresh = torch.where(batch.steps == 1, 1.0, 1 - v["dampening"])
        numbers = torch.stack([v["weight_decay"], v["momentum"], fresh, v["nesterov"], v["lr"]], 1)
        columns = batch.parameters, batch.gradients, batch.states["momentum_buffer"]
        for x, gradient, momentum in zip(*columns, strict=True):
            sgd_rows_(x, gradient.contiguous(), momentum, numbers=numbers, active=active)

    def update_(self, batch: ParameterBatch) -> None:
        """Update all models at once; the momentum of models without momentum is their gradient."""
        v, buffers = batch.values, batch.states["momentum_buffer"]
        gradients = plus(batch.gradients, batch.parameters, v["weight_decay"])
        undamped = (batch.steps == 1) | (v["momentum"] == 0)
        scale_(buffers, v["momentum"])
        add_(buffers, gradients, torch.where(undamped, 1.0, 1 - v["dampening"]))
        # Models with and without Nesterov's momentum (n = 1 or 0) in one formula: (1 - n) u + n (g + mu u).
        nesterov = v["nesterov"]
        directions = plus(buffers, buffers, nesterov * (v["momentum"] - 1))
        add_(directions, gradients, nesterov)
        add_(batch.parameters, buffers if is_zero(nesterov) else directions, -v["lr"])

    def extract(self, index: int) -> dict[str, Any]:
        """Return one model's state in the form of `torch.optim.SGD.state_dict`."""
        found = super().extract(index)
        for group in found["param_groups"]:
            for number in group["params"]:
                if number in found["state"] and not group["momentum"]:
                    found["state"][number]["momentum_buffer"] = None
        return found
