# SPDX-License-Identifier: Apache-2.0
"""Residuals of error feedback under a GradScaler: in the units of what is exchanged, whatever the scale was before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.codecs.feedback import of_server, of_worker
from thinwire.replica.replica import Replica


@dataclass
class ScaledResiduals:
    """Residuals that are scaled like the gradients while a backward pass exchanges these.

    Between passes they are what they would be without a scaler, so that checkpoints, switches and other numbers of
    workers need not know the scale. Scaling by a power of two, as a scaler's usual scales are, rounds nothing.

    Attributes:
        replicas: whose residuals they are.
        scaler: the loop's.
    """

    replicas: Sequence[Replica]
    scaler: torch.amp.GradScaler
    _scale: float | None = None

    def begin(self) -> None:
        """Before the first bucket of a pass; does nothing where a worker was lost in it, and buckets are sent again."""
        if self._scale is not None:
            return
        self._scale = self.scaler.get_scale()
        for residual in self._residuals():
            # One that is infinite would stay so. Gradients of that scale are infinite too, and their step is left out.
            most = torch.finfo(residual.dtype).max
            residual.mul_(self._scale).clamp_(-most, most)

    def end(self) -> None:
        """When all buckets of the pass have been waited for."""
        if self._scale is None:
            return
        for residual in self._residuals():
            residual.div_(self._scale)
        self._scale = None

    def _residuals(self) -> list[Tensor]:
        return [x for r in self.replicas for name, x in r.state.items() if of_worker(name) or of_server(name)]
