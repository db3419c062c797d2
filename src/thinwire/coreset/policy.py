# SPDX-License-Identifier: Apache-2.0
"""The base of all policies that choose points, and the points as they see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.validation import check_fields, check_ranges
from thinwire.coreset.proxies import LastLayer, Read, features, head_of, last_layer
from thinwire.coreset.subset import Strata, Subset
from thinwire.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Points:
    """The points, the model and the optimizer, as a policy may use them.

    Args:
        read: returns points without augmentation, with their classes.
        labels: int64, [n]; the class of every point.
        model: being trained; from inputs to logits.
        optimizer: of the model, for the second moments of an adaptive one.
        batch_size: points read at a time.
    """

    read: Read
    labels: Tensor
    model: nn.Module
    optimizer: Optimizer | None = None
    batch_size: int = 512

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.labels)

    @cached_property
    def features(self) -> Tensor:
        """The points themselves, float [n, d]; read once."""
        return features(self.read, torch.arange(self.n, device="cpu"))[0]

    def gradients(self, rows: Tensor | None = None, *, hidden: bool = False) -> LastLayer:
        """Return the last-layer gradients of these points, or of all, under the current model."""
        wanted = torch.arange(self.n, device="cpu") if rows is None else rows
        return last_layer(self.model, self.read, wanted, hidden=hidden, batch_size=self.batch_size)

    def moments(self, *, hidden: bool) -> Tensor | None:
        """Adam's second moments of the last layer, [classes, width + 1], or [classes] of its bias; None before step 1.

        Raises:
            ConfigError: the optimizer has none, or the layer has no bias.
        """
        parameters = dict(head_of(self.model).named_parameters())
        if self.optimizer is None or "bias" not in parameters:
            raise ConfigError("preconditioned=True: needs an Adam optimizer and a last layer with a bias")
        weight, bias = (self.optimizer.state.get(parameters[name], {}) for name in ("weight", "bias"))
        # The defaults are known before the first step, and SGD without momentum has no state at all.
        if "betas" not in self.optimizer.defaults or (weight and "exp_avg_sq" not in weight):
            raise ConfigError(f"preconditioned=True: {type(self.optimizer).__name__} has no second moments. Use Adam")
        if not weight or not bias:
            return None
        last: Tensor = bias["exp_avg_sq"]
        return torch.cat([weight["exp_avg_sq"], last[:, None]], dim=1) if hidden else last


@dataclass(frozen=True)
class Policy(ABC):
    """Which points to choose, and how often; its repr is a recipe that recreates it.

    Args:
        fraction: of the points that an epoch visits, in (0, 1].
        every: epochs between selections; None selects once.
        full_epochs: epochs on all the data before the first selection.
    """

    fraction: float = 0.1
    every: int | None = 1
    full_epochs: int = 0

    ordered: ClassVar[bool] = False
    """Whether points are visited in the order of selection."""

    def __post_init__(self) -> None:
        """Refuse values of other types or out of their ranges.

        Raises:
            ConfigError: with the value, the rule and the fix.
        """
        check_fields(self)
        check_ranges(
            self,
            fraction=("(0, 1]", "0.1 is usual"),
            every=("1..", "None selects once"),
            full_epochs=("0..", "0 is usual"),
        )

    @abstractmethod
    def choose(self, points: Points, seed: int) -> Subset | Strata:
        """Choose now among the points; `seed` is the key of every draw."""

    def has_drifted(self, points: Points, chosen: Subset, seed: int) -> bool:
        """Return True if the choice no longer represents all points; False unless a policy measures it."""
        return False

    def __str__(self) -> str:
        changed = [f"{f.name}={v!r}" for f in fields(self) if (v := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(changed)})"
