# SPDX-License-Identifier: Apache-2.0
"""What a task minimises: from a model and a batch to a loss, and to sums over held-out targets."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from thinwire.lab.tasks.data.base import Batch

IGNORED = -100
"""The target of padding, which counts neither in the loss nor in the metric."""


class Objective(Protocol):
    """The loss of a task."""

    def apply(self, model: nn.Module, batch: Batch) -> tuple[Any, Any]:
        """Call the model on a batch, on the model's device; returns its outputs and the targets."""
        ...

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The mean loss of a batch, a scalar."""
        ...

    def total(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """The sum of the losses of a batch's `count` targets, a scalar."""
        ...

    def hits(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """How many of a batch's `count` targets were predicted, a scalar; 0 where the metric does not ask."""
        ...

    def count(self, batch: Batch) -> int:
        """How many targets of a batch the loss is a mean over."""
        ...


class CrossEntropy:
    """The mean cross entropy in nats over targets that are not `IGNORED`."""

    def apply(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The logits, [..., classes], and the targets, [...]."""
        device = next(model.parameters()).device
        *inputs, targets = (tensor.to(device) for tensor in batch)
        return model(*inputs), targets

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The mean over targets."""
        return _cross_entropy(outputs, targets, "mean")

    def total(self, outputs: Tensor, targets: Tensor, count: int) -> Tensor:
        """The sum over targets."""
        return _cross_entropy(outputs, targets, "sum")

    def hits(self, outputs: Tensor, targets: Tensor, count: int) -> Tensor:
        """How many targets have the largest logit."""
        return ((outputs.argmax(-1) == targets) & (targets != IGNORED)).sum()

    def count(self, batch: Batch) -> int:
        """How many targets are not `IGNORED`."""
        return int((batch[-1] != IGNORED).sum())


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str) -> Tensor:
    # Flattened to one row per target.
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction=reduction)
