"""The optimizer of a run."""

from __future__ import annotations

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from thinwire.optimizers.lamb import Lamb
from thinwire.optimizers.one_bit_adam import OneBitAdam
from thinwire.optimizers.one_bit_lamb import OneBitLamb
from thinwire.optimizers.zero_one_adam import ZeroOneAdam
from thinwire.runs.recipes import Recipe
from thinwire.runs.settings import OptimizerName, Settings
from thinwire.strategies.base import Strategy
from thinwire.worker.compatibility import check_parameter_moves

_ADAPTIVE: dict[OptimizerName, type[AdamW | Lamb | OneBitLamb | OneBitAdam | ZeroOneAdam]] = {
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


def check_optimizer(recipe: Recipe, settings: Settings) -> None:
    """Refuse an optimizer that the recipe cannot train with; PyTorch's own methods take every optimizer.

    Raises:
        ConfigError: with the value, the rule and the fix.
    """
    if isinstance(recipe, Strategy):
        optimizer = make_optimizer(nn.Linear(1, 1), settings)
        recipe.check_optimizer(optimizer)
        check_parameter_moves(recipe, optimizer)
