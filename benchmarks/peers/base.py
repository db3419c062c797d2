# SPDX-License-Identifier: Apache-2.0
"""What the libraries' engines share."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire import Comm, ConfigError
from thinwire.lab.runs.baselines import Baseline, BaselineEngine


def own_address() -> str:
    """The address at which the others reach this worker."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing
        return probe.getsockname()[0]


class Held(nn.Module):
    """A model where a baseline's engine looks for it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        """Call the model."""
        return self.module(*inputs)


class LibraryEngine(BaselineEngine):
    """A model whose gradients stay here; what a library sends, it sends in `average` or in the optimizer's step.

    Args:
        network: with the model as its `module`.
        optimizer: of the model.
        control: the ranks of the run.
    """

    def __init__(self, network: Any, optimizer: Optimizer, control: Comm) -> None:
        super().__init__(network, optimizer, control)
        self.nbytes = sum(p.nbytes for p in network.parameters())
        # Evaluated is the mean of the workers' models.
        self.average = lambda: None

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients; nothing is sent."""
        loss.backward()

    @contextmanager
    def waiting(self, name: str = "parameters") -> Generator[None]:
        """Count the time within as waiting."""
        start = time.perf_counter()
        yield
        self.record_wait(name, start, time.perf_counter())


@dataclass(frozen=True)
class LibraryMethod(Baseline):
    """Another library's method."""

    def prepare(self, engine: BaselineEngine) -> None:
        """Not used: a peer makes its engine whole.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self}: is not a hook of DistributedDataParallel")
