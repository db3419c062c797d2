"""What the training loop needs of whoever moves the model: a thinwire strategy, or one of torch's own methods."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.comm.work import Interval
from thinwire.worker import resizing
from thinwire.worker.worker import Worker


class Engine(Protocol):
    """A model under a method, step by step."""

    @property
    def network(self) -> nn.Module:
        """What the loop calls."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """What moves the model."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        ...

    @property
    def payload_bytes(self) -> float:
        """Sent by this rank so far, for whatever reason."""
        ...

    @property
    def exposed_seconds(self) -> float:
        """Time in which this rank only waited for messages, so far."""
        ...

    @property
    def intervals(self) -> list[Interval]:
        """Who talked and waited when, recorded while `trace(True)`."""
        ...

    def metrics(self) -> dict[str, float]:
        """What the method noticed since this was last asked, by name."""
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the next update."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients."""
        ...

    def update(self) -> None:
        """Move the model."""
        ...

    def wait_pending(self) -> None:
        """Wait for messages in flight, so that nothing of this rank is on the wire."""
        ...

    def trace(self, on: bool) -> None:
        """Start or stop to record intervals."""
        ...

    def consensus(self) -> AbstractContextManager[nn.Module]:
        """The model to evaluate; all ranks enter together."""
        ...

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint; all ranks together."""
        ...

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from the newest checkpoint and return what was saved beside it."""
        ...


class GradientClock:
    """Knows when the last local gradient of a backward pass was final.

    What a backward pass takes after that moment is its tail: waiting for the gradients of others, and unpacking them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.last = 0.0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def tail(self, loss: Tensor) -> tuple[float, float]:
        """Run the backward pass; returns when its tail began and ended, in seconds of `time.perf_counter`."""
        loss.backward()
        end = time.perf_counter()
        return min(self.last, end), end

    def _note(self, _: Tensor) -> None:
        self.last = time.perf_counter()


class ThinwireEngine:
    """A model under a thinwire strategy; exposed time is what the comm's meter saw blocked in waits."""

    def __init__(self, worker: Worker, optimizer: Optimizer) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.network = worker.model
        self.consensus = worker.consensus
        self.metrics = worker.metrics
        self.wait_pending = worker.wait_pending

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
        """What the meter recorded while it traced."""
        return self.worker.comm.meter.intervals

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; a strategy that exchanges them does so meanwhile."""
        self.worker.comm.step = self.step
        loss.backward()

    def update(self) -> None:
        """The optimizer's step, with the strategy's hooks around it."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def trace(self, on: bool) -> None:
        """Let the meter record intervals, or not."""
        self.worker.comm.meter.tracing = on

    def load(self, folder: Path) -> dict[str, Any]:
        """Go on from the newest checkpoint, which another number of workers may have written."""
        return resizing.load(self.worker, folder)

    def save(self, folder: Path, extra: dict[str, Any]) -> None:
        """Write a checkpoint of all ranks."""
        self.worker.save(folder, extra=extra)
