# SPDX-License-Identifier: Apache-2.0
"""A model under a thinwire strategy, as the training loop calls it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.work import Interval
from thinwire.worker.worker import Worker, internals_of


class ThinwireEngine:
    """A model under a thinwire strategy; the comm's meter counts bytes, and seconds blocked in waits."""

    def __init__(self, worker: Worker, optimizer: Optimizer) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.network = worker.model
        self.consensus = worker.consensus
        self.metrics = partial(internals_of(worker).metrics, clear=True)  # each record has what is new
        self.wait_pending = internals_of(worker).wait_pending

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.worker.step

    @property
    def payload_bytes(self) -> float:
        """Bytes the meter has counted."""
        return self.worker.comm.meter.payload_bytes

    @property
    def exposed_seconds(self) -> float:
        """Seconds blocked in waits."""
        return self.worker.comm.meter.exposed_seconds

    @property
    def intervals(self) -> list[Interval]:
        """What the meter recorded while tracing was on."""
        return self.worker.comm.meter.intervals

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, in which some strategies exchange gradients."""
        # Errors and intervals of messages sent within the pass name this step.
        self.worker.comm.step = self.step
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, with the strategy's hooks around it."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def trace(self, on: bool) -> None:
        """Switch the recording of intervals on or off."""
        self.worker.comm.meter.tracing = on

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint, which another number of workers may have written."""
        return self.worker.load(folder)

    def save(self, folder: Path, extra: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint of all ranks."""
        self.worker.save(folder, extra=extra, keep=keep)
