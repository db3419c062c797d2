"""Optimizers whose parameters in training are not the ones to evaluate, such as AC-SA.

They tell it by a method `evaluating()`, a context in which the parameters are the result. Such an optimizer computes
the parameters from its own state at every step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.optim import Optimizer

from thinwire.errors import ConfigError
from thinwire.strategies.base import Strategy


def as_evaluated(optimizer: Optimizer) -> AbstractContextManager[Any]:
    """The context in which the optimizer's parameters are its result."""
    swap = getattr(optimizer, "evaluating", None)
    return nullcontext() if swap is None else swap()


def refuse_movers(strategy: Strategy, optimizer: Optimizer) -> None:
    """Refuse strategies that move parameters, where the optimizer would not notice.

    Raises:
        ConfigError: with the recipe and what to use instead.
    """
    if hasattr(optimizer, "evaluating") and strategy.moves_parameters:
        raise ConfigError(
            f"{type(optimizer).__name__} under {strategy}: the optimizer computes the parameters from its own state, "
            "and would undo what the strategy does to them; use AllReduce(), and no_sync() in all but the last pass of "
            "a round"
        )
