# SPDX-License-Identifier: Apache-2.0
"""Momentum of displacements: the optimizer's changes of the parameters, divided by the learning rate.

In units of the gradient, the momentum stays valid when the learning rate changes. At a learning rate of zero nothing
is added, and the momentum only decays.
"""

from typing import Annotated

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.validation import Range
from thinwire.errors import ConfigError

Momentum = Annotated[float, Range("[0, 1)", "0.9 is usual")]
"""A momentum that decays."""


def descend_(x: Tensor, direction: Tensor, lr: float | Tensor, factor: float = 1.0) -> Tensor:
    """Compute `x - factor * lr * direction` in place; `lr` is a number or a vector like `x`."""
    if isinstance(lr, Tensor):
        return x.addcmul_(direction, lr, value=-factor)
    return x.sub_(direction, alpha=factor * lr)


def accumulate_(momentum: Tensor, displacement: Tensor, lr: float | Tensor, *, keep: float, add: float = 1.0) -> Tensor:
    """Compute `keep * momentum + add * displacement / lr` in place; add nothing where `lr` is zero."""
    momentum.mul_(keep)
    if isinstance(lr, Tensor):
        # `where` also computes add / 0, and discards it.
        return momentum.addcmul_(displacement, torch.where(lr > 0, add / lr, 0.0))
    return momentum.add_(displacement, alpha=add / lr) if lr > 0 else momentum


def refuse_momentum(optimizer: Optimizer, recipe: object, otherwise: str) -> None:
    """Check that the optimizer of a strategy with momentum has no momentum itself.

    The check uses torch's names: `momentum` (SGD, RMSprop, Muon) and the first of `betas` (the Adam family).

    Args:
        optimizer: the workers' optimizer.
        recipe: the strategy.
        otherwise: the strategy to use with this optimizer, for the error.

    Raises:
        ConfigError: the optimizer has momentum.
    """
    for group in optimizer.param_groups:
        first = (group.get("betas") or (0.0,))[0]
        for value, name, instead in (
            (group.get("momentum", 0.0), "momentum", "momentum=0"),
            (first, "betas[0]", "betas=(0.0, ...)"),
        ):
            if value != 0:
                raise ConfigError(
                    f"{type(optimizer).__name__}({name}={float(value):g}) under {recipe}: the strategy has its own "
                    f"momentum, so momentum would be applied twice. Give the optimizer {instead}, or use {otherwise}, "
                    "which leaves momentum to the optimizer"
                )
