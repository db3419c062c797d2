# SPDX-License-Identifier: Apache-2.0
"""Accelerate's LocalSGD: https://huggingface.co/docs/accelerate/usage_guides/local_sgd."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.base import LibraryEngine, LibraryMethod
from thinwire import Comm
from thinwire.lab.runs.baselines import BaselineEngine


class AccelerateEngine(LibraryEngine):
    """The loop of the guide: `accelerator.backward`, `optimizer.step`, `local_sgd.step`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, control: Comm, period: int) -> None:
        self._accelerator = Accelerator(cpu=True)
        network, prepared = self._accelerator.prepare(model, optimizer)
        super().__init__(network, prepared, control)
        self._period = period
        self._local = LocalSGD(accelerator=self._accelerator, model=network, local_sgd_steps=period).__enter__()
        self.average = self._average

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; nothing is sent."""
        self._accelerator.backward(loss)

    def _average(self) -> None:
        due = (self.step + 1) % self._period == 0
        with self.waiting():
            self._local.step()
        self.count_all_reduce(self.nbytes if due else 0)


@dataclass(frozen=True)
class AccelerateLocalSGD(LibraryMethod):
    """Parameters are averaged every `period` steps."""

    period: int = 8

    name = "accelerate-local-sgd"
    paper = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767"

    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Prepare the model and the optimizer as the guide does."""
        return AccelerateEngine(model, optimizer, control, self.period)
