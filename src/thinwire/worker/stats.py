# SPDX-License-Identifier: Apache-2.0
"""What a worker has sent and waited for, with evaluation counted apart from training."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from thinwire.comm.base import Comm


@dataclass(frozen=True)
class Stats:
    """What one worker has done since `attach`; returned by `Worker.stats`.

    Attributes:
        steps: optimizer steps that this worker has taken.
        averages: steps in which the strategy exchanged gradients or parameters: every one under `AllReduce()`, every
            eighth under `LocalSGD(period=8)`.
        payload_bytes: bytes that this worker sent for training, as `Meter.payload_bytes` counts them. The parameters
            and buffers that `attach` sends are not included.
        wait_seconds: time that training was blocked while it waited for messages, in seconds.
        evaluation_bytes: bytes that this worker sent for `consensus()`, `export()`, `save()` and `load()`.
        evaluation_wait_seconds: time blocked in these calls, in seconds.
        check_bytes: bytes of the checks that all workers make the same call at the same step, which no other figure
            includes.

    Example:
        >>> import torch, thinwire
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> worker = thinwire.attach(model, optimizer, thinwire.LocalSGD(period=2))
        >>> for _ in range(4):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> worker.stats().steps
        4
    """

    steps: int
    averages: int
    payload_bytes: float
    wait_seconds: float
    evaluation_bytes: float
    evaluation_wait_seconds: float
    check_bytes: float


class Account:
    """Counts the steps of one worker, and what its comm has sent apart from them.

    Args:
        comm: of the worker, whose meter counts everything.

    Attributes:
        exchanged: whether the strategy has sent anything in the present step.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.exchanged = False
        self.begin()

    def begin(self) -> None:
        """Count from here on."""
        meter = self._comm.meter
        self._steps = self._averages = 0
        self._begun = meter.payload_bytes, meter.exposed_seconds, meter.check_bytes
        self._apart_bytes = self._apart_seconds = 0.0

    def end_step(self) -> None:
        """Count a step."""
        self._steps += 1
        self._averages += self.exchanged
        self.exchanged = False

    @contextmanager
    def apart(self) -> Generator[None]:
        """Count what is sent and waited for within it as evaluation."""
        meter = self._comm.meter
        sent, waited = meter.payload_bytes, meter.exposed_seconds
        try:
            yield
        finally:
            self._apart_bytes += meter.payload_bytes - sent
            self._apart_seconds += meter.exposed_seconds - waited

    @contextmanager
    def exchange(self) -> Generator[None]:
        """Run a hook of the strategy, and note whether it sends anything."""
        before = self._comm.meter.messages
        yield
        self.exchanged |= self._comm.meter.messages > before

    def stats(self) -> Stats:
        """The figures so far."""
        meter, (sent, waited, checks) = self._comm.meter, self._begun
        return Stats(
            steps=self._steps,
            averages=self._averages,
            payload_bytes=meter.payload_bytes - sent - self._apart_bytes,
            wait_seconds=meter.exposed_seconds - waited - self._apart_seconds,
            evaluation_bytes=self._apart_bytes,
            evaluation_wait_seconds=self._apart_seconds,
            check_bytes=meter.check_bytes - checks,
        )
