# SPDX-License-Identifier: Apache-2.0
"""Momentum of displacements: what an optimizer did to the parameters, divided by the learning rate.

In the units of a gradient the momentum stays valid when the learning rate changes. At a learning rate of zero nothing
is added, and the momentum only decays.
"""

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.errors import ConfigError


def descend_(x: Tensor, direction: Tensor, lr: float | Tensor, factor: float = 1.0) -> Tensor:
    """`x - factor * lr * direction`, in place; `lr` is a number or a vector like `x`."""
    if isinstance(lr, Tensor):
        return x.addcmul_(direction, lr, value=-factor)
    return x.sub_(direction, alpha=factor * lr)


def accumulate_(momentum: Tensor, displacement: Tensor, lr: float | Tensor, *, keep: float, add: float = 1.0) -> Tensor:
    """`keep * momentum + add * displacement / lr`, in place; where `lr` is zero nothing is added."""
    momentum.mul_(keep)
    if isinstance(lr, Tensor):
        # `where` also computes add / 0, and discards it.
        return momentum.addcmul_(displacement, torch.where(lr > 0, add / lr, 0.0))
    return momentum.add_(displacement, alpha=add / lr) if lr > 0 else momentum


def check_momentum(momentum: float) -> None:
    """Refuse a momentum that does not decay.

    Raises:
        ConfigError: it is not in [0, 1).
    """
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum={momentum}: must lie in [0, 1); 0.9 is usual")


def refuse_momentum(optimizer: Optimizer, recipe: object, otherwise: str) -> None:
    """Refuse an optimizer with momentum under a strategy that has momentum itself.

    It is looked up by torch's names: `momentum` (SGD, RMSprop, Muon) and the first of `betas` (the Adam family).

    Args:
        optimizer: of the workers.
        recipe: the strategy.
        otherwise: what to use with this optimizer, for the error.

    Raises:
        ConfigError: with the value and what to use instead.
    """
    for group in optimizer.param_groups:
        first = (group.get("betas") or (0.0,))[0]
        for value, name, instead in (
            (group.get("momentum", 0.0), "momentum", "momentum=0"),
            (first, "betas[0]", "betas=(0.0, ...)"),
        ):
            if value != 0:
                raise ConfigError(
                    f"{type(optimizer).__name__}({name}={float(value):g}) under {recipe}: it has a momentum of its "
                    f"own, so momentum would be applied twice; give the optimizer {instead}, or use {otherwise}, "
                    "which leaves momentum to the optimizer"
                )
