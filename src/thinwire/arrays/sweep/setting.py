# SPDX-License-Identifier: Apache-2.0
"""All hyperparameters of one trial."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.core.validation import check_ranges
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
        rank: of an adapter.
        lora_dropout: dropout rate of an adapter's input.
        adapter_seed: seed of an adapter's initial values and dropout.
        lora_alpha: what an adapter is scaled by, times its rank; None takes twice the rank.

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
    rank: float = 8.0
    lora_dropout: float = 0.0
    adapter_seed: float = 0.0
    lora_alpha: float | None = None

    def __post_init__(self) -> None:
        sizes = ("lr", "momentum", "weight_decay", "eps", "lr_decay")
        check_ranges(
            self,
            **dict.fromkeys(sizes, ("[0, inf)", "Use 0 or more")),
            **dict.fromkeys(("beta1", "beta2", "alpha", "rho"), ("[0, 1)", "0.9 and 0.999 are usual")),
            lora_dropout=("[0, 1)", "0.05 is usual"),
            lora_alpha=("(0, inf)", "Twice the rank is usual"),
            batch_size=("1..", "A step has at least 1 example"),
        )
        for name, least in (("rank", 1), ("adapter_seed", 0)):
            value = getattr(self, name)
            if not least <= value < 2**32 or value != int(value):
                raise ConfigError(f"{name}={value}: must be a whole number, at least {least}")
