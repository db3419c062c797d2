# SPDX-License-Identifier: Apache-2.0
"""SAGA for linear models: variance reduction with a table of one number for each sample and output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.base import evaluate


class Saga(Optimizer):
    r"""Run SGD with a table of each sample's last gradient, which reduces the variance.

    To minimize $F(w)=\frac1n\sum_i f_i(w)+\frac\lambda2|w|^2$, with $f_i$ the loss of sample $i$, $\alpha_i$ its entry
    in the table, and $B$ a mini-batch of $b$ samples,

    $$w \leftarrow w - \gamma(\tfrac1b\sum_{i\in B}(\nabla f_i(w)-\alpha_i) + \tfrac1n\sum_j\alpha_j
      + \lambda w), \qquad \alpha_i \leftarrow \nabla f_i(w)\ \text{for } i\in B .$$

    The gradient of a linear layer is $r_i\otimes[x_i;1]$, with $x_i$ the layer's input and $r_i$ the gradient with
    respect to its output. Since $x_i$ must be the same in every epoch, the table stores only $r_i$: one number per
    sample and output. All entries start at zero. The learning rate need not decrease: with a constant $\gamma\le
    1/(3L)$, where $L$ is the Lipschitz constant of each $\nabla f_i$, convergence is linear if $F$ is strongly convex.

    The loss must be the mean over the batch. To weight samples, multiply their losses by the weights; if the weights
    have mean 1, like those of coresets, $F$ has the weighted mean of the `n` losses. The samples of a batch must be
    drawn uniformly, without repetition.

    State: `table` [n, outputs], and for each parameter `mean`, the mean of the gradients in the table.

    Defazio, Bach and Lacoste-Julien, SAGA: A Fast Incremental Gradient Method With Support for Non-Strongly Convex
    Composite Objectives, NeurIPS 2014, arXiv:1407.0202, section 2, with mini-batches.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]])
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> optimizer = Saga(layer, n=2, lr=0.05)
        >>> for step in range(400):
        ...     indices = torch.tensor([step % 2])
        ...     optimizer.zero_grad()
        ...     ((layer(x[indices]) - y[indices]) ** 2).mean().backward()
        ...     optimizer.step(indices=indices)
        >>> round(layer.weight.item(), 4)  # least squares: (1 * 1 + 2 * 4) / (1 + 4)
        1.8

    Args:
        layer: the model, or its only trained layer.
        n: the number of samples of the data set; each has an entry in the table.
        lr: $\gamma$; convergence is guaranteed up to $1/(3L)$.
        weight_decay: $\lambda$; its gradient $\lambda w$ is computed at every step and is not stored in the table.

    Raises:
        ConfigError: a value is out of its range.
    """

    def __init__(self, layer: nn.Linear, n: int, *, lr: float, weight_decay: float = 0.0) -> None:
        check_range("n", n, "1..", "Give the number of samples of the data set")
        check_range("lr", lr, "(0, inf)", "1/(3L) is usual")
        check_range("weight_decay", weight_decay, "[0, inf)", "0 is usual")
        super().__init__(layer.parameters(), {"lr": lr, "weight_decay": weight_decay})
        self.n = n
        self._layer = layer
        self._inputs: Tensor | None = None
        self._residuals: Tensor | None = None
        self.state[layer.weight]["table"] = layer.weight.new_zeros(n, layer.out_features)
        for parameter in self._trained():
            self.state[parameter]["mean"] = torch.zeros_like(parameter)
        layer.register_forward_hook(self._record_inputs)

    @overload
    def step(self, closure: None = None, *, indices: Tensor | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, indices: Tensor | None = None) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, indices: Tensor | None = None) -> float | None:
        """Take one SAGA step, with the gradients of the batch's mean loss.

        Args:
            closure: recomputes the loss and its gradients, as in torch.
            indices: int64, [batch]; the samples of the batch, as numbers from 0 to n - 1.

        Raises:
            ConfigError: indices are missing, repeated, out of range or not one for each sample; or no backward pass ran
                through the layer since the last step.
        """
        loss = evaluate(closure)
        inputs, residuals, rows = self._batch(indices)
        table = self.state[self._layer.weight]["table"]
        # backward() divides the residuals by the batch size, as the loss is a mean.
        change = residuals * len(rows) - table[rows]
        batch = table[rows] / len(rows)
        group = self.param_groups[0]
        for parameter in self._trained():
            assert parameter.grad is not None
            mean = self.state[parameter]["mean"]
            direction = parameter.grad - self._outer(parameter, batch, inputs) + mean
            parameter.sub_(direction.add_(parameter, alpha=group["weight_decay"]), alpha=group["lr"])
            mean.add_(self._outer(parameter, change, inputs), alpha=1 / self.n)
        table[rows] += change
        self._inputs = self._residuals = None
        return loss

    def _trained(self) -> list[nn.Parameter]:
        return list(self._layer.parameters())

    def _outer(self, parameter: Tensor, numbers: Tensor, inputs: Tensor) -> Tensor:
        """Return the sum of the table's gradients with these numbers, like the parameter."""
        return numbers.T @ inputs if parameter is self._layer.weight else numbers.sum(0)

    def _record_inputs(self, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        # Evaluation passes have no gradients and must not replace the batch.
        if output.requires_grad:
            self._inputs = inputs[0].detach()
            output.register_hook(self._record_residuals)

    def _record_residuals(self, gradient: Tensor) -> None:
        self._residuals = gradient.detach()

    def _batch(self, indices: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if indices is None:
            raise ConfigError("step(indices=None): SAGA needs the numbers of the batch's samples. Pass indices=")
        if self._inputs is None or self._residuals is None:
            raise ConfigError("step(): no backward() ran through the layer since the last step. Call it first")
        if self._residuals.ndim != 2 or indices.shape != (len(self._residuals),):
            raise ConfigError(
                f"indices {list(indices.shape)} for outputs {list(self._residuals.shape)}: each sample needs one index"
            )
        rows = indices.to(self._residuals.device)
        if int(rows.min()) < 0 or int(rows.max()) >= self.n or len(rows.unique()) < len(rows):
            raise ConfigError(f"indices: the samples of a batch must differ and lie in 0..{self.n - 1}")
        return self._inputs, self._residuals, rows

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Raises:
            ConfigError: the table has another number of samples.
        """
        tables = [entry["table"] for entry in state_dict["state"].values() if "table" in entry]
        if not tables or len(tables[0]) != self.n:
            found = len(tables[0]) if tables else "no"
            raise ConfigError(f"the state has {found} samples: this optimizer needs {self.n}")
        super().load_state_dict(state_dict)
