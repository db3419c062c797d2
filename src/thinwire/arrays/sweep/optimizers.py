# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a sweep: of an array, and torch's own for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from thinwire.arrays.finetuning.array import AdapterArray
from thinwire.arrays.fusion.array import FusedArray
from thinwire.arrays.fusion.optimizers.adam import Adam, AdamW
from thinwire.arrays.fusion.optimizers.adaptive import Adadelta, Adagrad, RMSprop
from thinwire.arrays.fusion.optimizers.base import FusedOptimizer
from thinwire.arrays.fusion.optimizers.lamb import LAMB
from thinwire.arrays.fusion.optimizers.sgd import SGD
from thinwire.arrays.sweep.setting import Setting
from thinwire.methods.optimizers.lamb import Lamb


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer that trials may use.

    Args:
        fused: makes that of an array.
        alone: makes torch's own, or thinwire's for one model.
        rate: a usual learning rate, for tasks that have none of their own for it.
        hyperparameters: those that it has beside lr and weight_decay, with their usual values.
    """

    fused: Any
    alone: Any
    rate: float
    hyperparameters: Mapping[str, float]


_BETAS = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
OPTIMIZERS = {
    "sgd": OptimizerKind(SGD, torch.optim.SGD, 0.1, {"momentum": 0.9}),
    "adam": OptimizerKind(Adam, torch.optim.Adam, 1e-3, _BETAS),
    "adamw": OptimizerKind(AdamW, torch.optim.AdamW, 1e-3, _BETAS),
    "lamb": OptimizerKind(LAMB, partial(Lamb, bias_correction=True), 1e-2, _BETAS),
    "adagrad": OptimizerKind(Adagrad, torch.optim.Adagrad, 1e-2, {"lr_decay": 0.0, "eps": 1e-10}),
    "rmsprop": OptimizerKind(RMSprop, torch.optim.RMSprop, 1e-3, {"alpha": 0.99, "eps": 1e-8, "momentum": 0.0}),
    "adadelta": OptimizerKind(Adadelta, torch.optim.Adadelta, 1.0, {"rho": 0.9, "eps": 1e-6}),
}
"""Every optimizer that arrays of models have, by the name that options give it."""


def fused_optimizer(array: FusedArray | AdapterArray, settings: Sequence[Setting]) -> FusedOptimizer:
    """Return an optimizer of the array with each trial's hyperparameters."""
    kind = OPTIMIZERS[settings[0].optimizer]
    names = ("lr", "weight_decay", *kind.hyperparameters)
    values = {name: [float(getattr(each, name)) for each in settings] for name in names}
    return kind.fused(array.parameters(), **_arguments(values))


def torch_optimizer(model: nn.Module, setting: Setting) -> torch.optim.Optimizer:
    """Return the optimizer of one model by itself, with one trial's hyperparameters."""
    kind = OPTIMIZERS[setting.optimizer]
    names = ("lr", "weight_decay", *kind.hyperparameters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return kind.alone(trained, **_arguments({name: getattr(setting, name) for name in names}))


def _arguments(values: dict[str, Any]) -> dict[str, Any]:
    """Both betas are one argument."""
    if "beta1" not in values:
        return values
    rest = {name: value for name, value in values.items() if name not in ("beta1", "beta2")}
    return {**rest, "betas": (values["beta1"], values["beta2"])}
