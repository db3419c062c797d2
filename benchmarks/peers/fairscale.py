# SPDX-License-Identifier: Apache-2.0
"""fairscale's SlowMoDistributedDataParallel: https://fairscale.readthedocs.io/en/latest/api/experimental/nn/slowmo_ddp.html.

The library waits for CUDA streams wherever it has sent something, and pins memory; without a GPU there is neither, so
these calls do nothing here. It trains with what it recommends: momentum 0.2 with up to 4 nodes and 0.5 with 8, the
memory-efficient form with local SGD, and a slow step every 48 steps.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fairscale.experimental.nn.data_parallel import SlowMoBaseAlgorithm, SlowMoDistributedDataParallel
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.peers.base import LibraryEngine, LibraryMethod
from thinwire import Comm
from thinwire.lab.runs.baselines import BaselineEngine


class _NoStream:
    def wait_stream(self, other: Any) -> None:
        """Do nothing."""

    def synchronize(self) -> None:
        """Do nothing."""


def without_cuda() -> None:
    """Let the library's calls of CUDA do nothing."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: _NoStream()
    torch.cuda.stream = lambda *_: nullcontext()
    Tensor.pin_memory = lambda tensor, *_: tensor
    Tensor.cuda = lambda tensor, *_: tensor


class FairscaleEngine(LibraryEngine):
    """`perform_slowmo` after each step, as the library's documentation has it."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, control: Comm, base: SlowMoBaseAlgorithm, local: int, slow: int
    ) -> None:
        without_cuda()
        self._gossips = base == SlowMoBaseAlgorithm.SGP
        network = SlowMoDistributedDataParallel(
            model,
            nprocs_per_node=1,
            slowmo_base_algorithm=base,
            slowmo_momentum=0.2 if control.size <= 4 else 0.5,
            slowmo_memory_efficient=not self._gossips,
            slowmo_frequency=slow,
            localsgd_frequency=local,
        )
        super().__init__(network, optimizer, control)
        self._local = local
        self.average = self._average

    def update(self) -> None:
        """The optimizer's step and the library's; gradients are dropped between them, which it recommends."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._average()
        self.step += 1

    def _average(self) -> None:
        with self.waiting():
            self.network.perform_slowmo(self.optimizer)
        if self._gossips:
            self.payload_bytes += self.nbytes
        elif (self.step + 1) % self._local == 0:
            self.count_all_reduce(self.nbytes)


@dataclass(frozen=True)
class FairscaleSlowMo(LibraryMethod):
    """Local SGD with slow momentum: averages every `period` steps, a slow step every `slow`."""

    period: int = 8
    slow: int = 48

    name = "fairscale-slowmo"
    paper = "Wang et al., SlowMo, ICLR 2020, arXiv:1910.00643"

    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Wrap the model."""
        return FairscaleEngine(model, optimizer, control, SlowMoBaseAlgorithm.LOCALSGD, self.period, self.slow)


@dataclass(frozen=True)
class FairscaleSGP(LibraryMethod):
    """Stochastic gradient push: the model goes to one worker at every step; a slow step every `slow`."""

    slow: int = 48

    name = "fairscale-sgp"
    paper = "Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792"

    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Wrap the model."""
        return FairscaleEngine(model, optimizer, control, SlowMoBaseAlgorithm.SGP, 3, self.slow)
