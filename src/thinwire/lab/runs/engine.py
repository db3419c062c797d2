# SPDX-License-Identifier: Apache-2.0
"""A model under a thinwire strategy, as the training loop calls it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Interval
from thinwire.worker.worker import Worker, internals_of


class ThinwireEngine:
    """A model under a thinwire strategy; meters of comms count bytes, and seconds blocked in waits.

    Args:
        worker: trains the model.
        optimizer: of the model.
        comms: over which its messages pass; the worker's unless given.
    """

    def __init__(self, worker: Worker, optimizer: Optimizer, comms: Sequence[Comm] = ()) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.network = worker.model
        self.consensus = worker.consensus
        self.metrics = partial(internals_of(worker).metrics, clear=True)  # each record has what is new
        self.wait_pending = internals_of(worker).wait_pending
        self._given = comms

    @property
    def comms(self) -> Sequence[Comm]:
        """The comms over which messages pass now; a view of an elastic worker has its own."""
        return self._given or (self.worker.comm,)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.worker.step

    @property
    def payload_bytes(self) -> float:
        """Bytes sent by this rank so far, while training or not."""
        return sum(comm.meter.payload_bytes for comm in self.comms)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which this rank only waited for messages, so far."""
        return sum(comm.meter.exposed_seconds for comm in self.comms)

    @property
    def intervals(self) -> list[Interval]:
        """Messages and waits of this rank, recorded while tracing was on."""
        return [interval for comm in self.comms for interval in comm.meter.intervals]

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass, in which some strategies exchange gradients."""
        # Errors and intervals of messages sent within the pass name this step.
        for comm in self.comms:
            comm.step = self.step
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, with the strategy's hooks around it."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def trace(self, on: bool) -> None:
        """Switch the recording of intervals on or off."""
        for comm in self.comms:
            comm.meter.tracing = on

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint, which another number of workers may have written."""
        return self.worker.load(folder)

    def save(self, folder: Path, extra: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint of all ranks."""
        self.worker.save(folder, extra=extra, keep=keep)
