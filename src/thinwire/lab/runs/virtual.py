# SPDX-License-Identifier: Apache-2.0
"""Training in virtual time: real gradients, whose computation takes as long as it is said to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import Tensor
from torch.optim import Optimizer

from thinwire.lab.emulate import Straggler
from thinwire.lab.runs.engine import ThinwireEngine
from thinwire.planning.plan.predict import ModelTime
from thinwire.planning.simulate import SimulatedComm
from thinwire.worker.worker import Worker


class VirtualEngine(ThinwireEngine):
    """An engine on a simulated worker: what it computes takes virtual time, and gradients come one after the other.

    Args:
        worker: over a simulated comm.
        optimizer: of the worker's model.
        comm: the simulated comm.
        step: how long a training step takes without communication.
        straggler: how much this worker is slowed down.
    """

    def __init__(
        self, worker: Worker, optimizer: Optimizer, comm: SimulatedComm, step: ModelTime, straggler: Straggler
    ) -> None:
        super().__init__(worker, optimizer)
        self._comm, self._step_time, self._straggler = comm, step, straggler
        self._factor = straggler.factor * comm.slowdown
        self._passed = 0.0  # share of the backward pass
        trained = [p for p in worker.model.parameters() if p.requires_grad]
        for parameter, share in zip(trained, step.ready or _by_elements(trained), strict=True):
            # Before the gradient is added up, which hands it to the strategy.
            parameter.register_hook(self._until(share))

    def backward(self, loss: Tensor) -> None:
        """The forward pass, which has been computed already, takes its time now; then the backward pass does."""
        comm, step = self._comm, self._step_time
        comm.step = self.step
        # The comm slows down what it is told to compute; a stall takes as long on every worker.
        comm.compute(step.forward * self._straggler.factor + self._straggler.stall(self.step) / comm.slowdown)
        self._passed = 0.0
        super().backward(loss)
        self._sleep_until(1.0)

    def update(self) -> None:
        """The optimizer's step, with the strategy's hooks around it."""
        self._comm.sleep(self._step_time.update * self._factor)
        super().update()

    def _until(self, share: float) -> Callable[[Tensor], None]:
        return lambda _: self._sleep_until(share)

    def _sleep_until(self, share: float) -> None:
        """Let time pass until this share of the backward pass is over."""
        if share > self._passed:
            # Not until a time: what comes between, as a pause does, holds up the rest.
            self._comm.sleep((share - self._passed) * self._step_time.backward * self._factor)
            self._passed = share


def _by_elements(parameters: Sequence[Tensor]) -> list[float]:
    """When each gradient is final, if tensors take their time by their elements, the last one first."""
    sizes = [each.numel() for each in reversed(parameters)]
    return [done / sum(sizes) for done in accumulate(sizes)][::-1]
