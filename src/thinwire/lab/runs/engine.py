# SPDX-License-Identifier: Apache-2.0
"""What the training loop calls: a model under a thinwire strategy, or under one of PyTorch's own methods."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.core.comm.work import Interval
from thinwire.worker.worker import Worker, internals_of


class Engine(Protocol):
    """A model under a strategy or a baseline, step by step."""

    @property
    def network(self) -> nn.Module:
        """The module whose forward pass the loop calls."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The model's optimizer."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def payload_bytes(self) -> float:
        """Bytes sent by this rank so far, while training or not."""
        ...

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which this rank only waited for messages, so far."""
        ...

    @property
    def intervals(self) -> list[Interval]:
        """Messages and waits of this rank, recorded while `trace(True)`."""
        ...

    def metrics(self) -> dict[str, float]:
        """The method's measurements since the last call, by name."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass."""
        ...

    def update(self) -> None:
        """Take the optimizer's step."""
        ...

    def wait_pending(self) -> None:
        """Wait for all messages in flight."""
        ...

    def trace(self, on: bool) -> None:
        """Start or stop recording intervals."""
        ...

    def consensus(self) -> AbstractContextManager[nn.Module]:
        """The model to evaluate; every rank must enter."""
        ...

    def save(self, folder: Path, extra: dict[str, Any], *, keep: int) -> None:
        """Write a checkpoint, and keep the newest ones; every rank must call."""
        ...

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the newest checkpoint; returns the `extra` saved with it."""
        ...


class GradientClock:
    """Times the tail of a backward pass: from the moment the last local gradient is final to the end of the pass.

    In it a rank waits for other ranks' gradients, and unpacks them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.last = 0.0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._record_time)

    def tail(self, loss: Tensor) -> tuple[float, float]:
        """Run the backward pass; returns the start and end of its tail, in seconds of `time.perf_counter`."""
        loss.backward()
        end = time.perf_counter()
        return min(self.last, end), end

    def _record_time(self, _: Tensor) -> None:
        self.last = time.perf_counter()


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

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

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
