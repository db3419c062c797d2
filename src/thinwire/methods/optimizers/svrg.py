# SPDX-License-Identifier: Apache-2.0
"""SVRG: variance reduction with an occasional full gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.replica.flat import restored
from thinwire.core.validation import check_range
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.base import evaluate


class Svrg(Optimizer):
    r"""Step along the mini-batch gradient, corrected by the gradients at a snapshot.

    With $\tilde w$ the parameters at the last snapshot and $\mu=\frac1n\sum_i\nabla f_i(\tilde w)$,

    $$w \leftarrow w - \gamma(\nabla f_B(w) - \nabla f_B(\tilde w) + \mu + \lambda w).$$

    With a constant $\gamma$ convergence is linear if the sum is strongly convex. A snapshot after every one or two
    passes is usual::

        optimizer = Svrg(model.parameters(), lr=0.1)
        for epoch in range(20):
            optimizer.snapshot(full)                # backward of the mean loss over all samples, in pieces or at once
            for x, y in batches:
                optimizer.step(lambda: backward_of(model, x, y))

    A step calls its closure twice, at $\tilde w$ and at $w$; both calls must compute the same loss function, without
    dropout or running statistics. Put weights of samples into both losses.

    Cost: a step is two backward passes, a snapshot one over all samples. State: `anchor` ($\tilde w$) and `mean`
    ($\mu$), each like the parameters.

    Johnson and Zhang, Accelerating Stochastic Gradient Descent using Predictive Variance Reduction, NeurIPS 2013,
    Figure 1, option I.

    Example:
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [4.0]])
        >>> model = nn.Linear(1, 1, bias=False)
        >>> def backward(rows):
        ...     loss = ((model(x[rows]) - y[rows]) ** 2).mean()
        ...     loss.backward()
        ...     return loss.item()
        >>> optimizer = Svrg(model.parameters(), lr=0.05)
        >>> for epoch in range(20):
        ...     optimizer.snapshot(lambda: backward([0, 1]))
        ...     for row in (0, 1, 1, 0):
        ...         _ = optimizer.step(lambda row=row: backward([row]))
        >>> round(model.weight.item(), 4)  # least squares: (1 * 1 + 2 * 4) / (1 + 4)
        1.8

    Args:
        params: the parameters.
        lr: $\gamma$.
        weight_decay: $\lambda$; its gradient is exact at every step, and not part of the closures.

    Raises:
        ConfigError: a value is out of its range.
    """

    # Strategies that use one gradient per step refuse it.
    evaluates_several_gradients = True

    def __init__(
        self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]], lr: float, *, weight_decay: float = 0.0
    ) -> None:
        check_range("lr", lr, "(0, inf)", "1/(10L) is usual")
        check_range("weight_decay", weight_decay, "[0, inf)", "0 is usual")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def snapshot(self, closure: Callable[[], object]) -> None:
        """Store the parameters, and the gradient that the closure accumulates.

        Args:
            closure: accumulates the gradients of the mean loss over all samples; they are zeroed first.
        """
        self.zero_grad()
        evaluate(closure)
        for parameter, _ in self._trained():
            gradient = _gradient(parameter)
            self.state[parameter]["anchor"] = parameter.detach().clone()
            self.state[parameter]["mean"] = gradient.clone()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step.

        Args:
            closure: runs backward of the mini-batch's mean loss and returns the loss; it need not call zero_grad.

        Returns:
            The mini-batch's loss before the step.

        Raises:
            ConfigError: no closure was passed, or no snapshot was taken.
        """
        if closure is None:
            raise ConfigError(
                "step(): SVRG evaluates gradients at two points, so it needs a closure that runs backward()"
            )
        trained = self._trained()
        if any("anchor" not in self.state[parameter] for parameter, _ in trained):
            raise ConfigError("step(): no snapshot was taken. Call snapshot() with the gradient of all samples first")
        # The anchor first, so that the gradients of the current point remain in `grad`.
        before = self._at_anchor(trained, closure)
        self.zero_grad()
        loss = evaluate(closure)
        for (parameter, group), old in zip(trained, before, strict=True):
            direction = _gradient(parameter) - old + self.state[parameter]["mean"]
            parameter.sub_(direction.add_(parameter, alpha=group["weight_decay"]), alpha=group["lr"])
        return loss

    def _at_anchor(self, trained: list[tuple[Tensor, dict[str, Any]]], closure: Callable[[], float]) -> list[Tensor]:
        """Compute the mini-batch's gradients at the snapshot; restore the parameters even if the closure fails."""
        with restored([parameter for parameter, _ in trained]):
            for parameter, _ in trained:
                parameter.copy_(self.state[parameter]["anchor"])
            self.zero_grad()
            evaluate(closure)
            return [_gradient(parameter).clone() for parameter, _ in trained]

    def _trained(self) -> list[tuple[Tensor, dict[str, Any]]]:
        return [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
