# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.lab.runs.recipes import Recipe
from thinwire.lab.runs.settings import Settings
from thinwire.methods.optimizers.lamb import Lamb
from thinwire.methods.optimizers.one_bit_adam import OneBitAdam
from thinwire.methods.optimizers.one_bit_lamb import OneBitLamb
from thinwire.methods.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.methods.strategies.base import Strategy
from thinwire.worker.compatibility import check_parameter_moves

_ADAPTIVE: dict[str, type[Lamb | OneBitLamb | OneBitAdam | ZeroOneAdam]] = {
    "lamb": Lamb,
    "onebit-lamb": OneBitLamb,
    "onebit-adam": OneBitAdam,
    "zero-one-adam": ZeroOneAdam,
}
_FUSED = ("cpu", "cuda")


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """Return the optimizer that the settings name, over all parameters."""
    make = maker_of(settings.optimizer, settings.momentum, lr=settings.lr, weight_decay=settings.weight_decay)
    return make(list(model.parameters()))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def maker_of(name: str, momentum: float, **more: Any) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer from parameters.

    Args:
        name: as in `Settings`.
        momentum: of SGD.
        more: further arguments, such as `lr`, which is 1e-3 unless given.
    """
    more = {"lr": 1e-3, **more}

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        kind = _ADAPTIVE.get(name)
        if kind is not None:
            return kind(parameters, **more)
        if name == "adamw":
            return AdamW(parameters, fused=_can_fuse(parameters), **more)
        return SGD(parameters, momentum=momentum, fused=_can_fuse(parameters), **more)

    return make


def _can_fuse(parameters: Sequence[nn.Parameter]) -> bool | None:
    """True where torch has one kernel for the whole step, five times as fast as its loop on a CPU; None: torch decides.

    With AdamW that loop is a seventh of a step of the GPT of 6 M parameters on two sequences.
    """
    return all(x.is_floating_point() and x.device.type in _FUSED for x in parameters) or None


def check_optimizer(recipe: Recipe, settings: Settings) -> None:
    """Refuse an optimizer that the recipe cannot train with; PyTorch's own methods take every optimizer.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    if isinstance(recipe, Strategy):
        optimizer = make_optimizer(nn.Linear(1, 1), settings)
        recipe.check(settings.copies, optimizer)
        check_parameter_moves(recipe, optimizer)
