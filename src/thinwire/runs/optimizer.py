# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.optimizers.lamb import Lamb
from thinwire.optimizers.one_bit_adam import OneBitAdam
from thinwire.optimizers.one_bit_lamb import OneBitLamb
from thinwire.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.runs.recipes import Recipe
from thinwire.runs.settings import Settings
from thinwire.strategies.base import Strategy
from thinwire.worker.compatibility import check_parameter_moves

_ADAPTIVE: dict[str, type[AdamW | Lamb | OneBitLamb | OneBitAdam | ZeroOneAdam]] = {
    "adamw": AdamW,
    "lamb": Lamb,
    "onebit-lamb": OneBitLamb,
    "onebit-adam": OneBitAdam,
    "zero-one-adam": ZeroOneAdam,
}


def make_optimizer(model: nn.Module, settings: Settings) -> Optimizer:
    """The optimizer that the settings name, over all parameters."""
    kind = _ADAPTIVE.get(settings.optimizer)
    if kind is not None:
        return kind(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    return SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def maker_of(name: str, momentum: float) -> Callable[[list[nn.Parameter]], Optimizer]:
    """What makes an optimizer of that name from parameters, where its learning rate does not matter.

    Args:
        name: as in `Settings`.
        momentum: of SGD.
    """
    kind = _ADAPTIVE.get(name)

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=1e-3, momentum=momentum) if kind is None else kind(parameters, lr=1e-3)

    return make


def check_optimizer(recipe: Recipe, settings: Settings) -> None:
    """Refuse an optimizer that the recipe cannot train with; PyTorch's own methods take every optimizer.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    if isinstance(recipe, Strategy):
        optimizer = make_optimizer(nn.Linear(1, 1), settings)
        recipe.check_optimizer(optimizer)
        check_parameter_moves(recipe, optimizer)
