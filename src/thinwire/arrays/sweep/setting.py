# SPDX-License-Identifier: Apache-2.0
"""All hyperparameters of one trial."""

from __future__ import annotations

import math
from dataclasses import dataclass

from thinwire.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """All hyperparameters of one trial.

    Args:
        lr: peak learning rate.
        momentum: momentum of sgd and rmsprop.
        weight_decay: weight decay, as torch's optimizer of that name applies it.
        optimizer: one of `OPTIMIZERS`.
        batch_size: examples per step.
        model_size: a named size of the task's model.
        beta1: decay rate of the first moment of adam, adamw and lamb.
        beta2: decay rate of their second moment.
        eps: epsilon of every optimizer but sgd.
        alpha: decay rate of rmsprop's squares.
        rho: decay rate of adadelta's squares.
        lr_decay: decay of adagrad's learning rate.

    Raises:
        ConfigError: a number out of its range.
    """

    lr: float
    momentum: float
    weight_decay: float
    optimizer: str
    batch_size: int
    model_size: str
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    alpha: float = 0.99
    rho: float = 0.9
    lr_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("lr", "momentum", "weight_decay", "eps", "lr_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value}: must be finite and not negative")
        for name in ("beta1", "beta2", "alpha", "rho"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"{name}={value}: must lie in [0, 1); 0.9 and 0.999 are usual")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size={self.batch_size}: a step needs at least 1 example")
