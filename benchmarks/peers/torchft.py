# SPDX-License-Identifier: Apache-2.0
"""torchft's LocalSGD and DiLoCo: https://github.com/meta-pytorch/torchft, `examples/localsgd` and `examples/diloco`.

Each worker is a replica group of its own, with its own manager; the lighthouse is with rank 0.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torch.optim import SGD, Optimizer
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from benchmarks.peers.base import Held, LibraryEngine, LibraryMethod, own_address
from thinwire import Comm
from thinwire.lab.runs.baselines import BaselineEngine
from thinwire.worker.handshake import gather_texts

_TIMEOUT = timedelta(seconds=300)


class TorchftEngine(LibraryEngine):
    """A model under a manager; the library's hooks on the optimizer's step do the rest."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, control: Comm, period: int) -> None:
        super().__init__(Held(model), optimizer, control)
        address, texts = own_address(), []
        if control.rank == 0:
            self._lighthouse = LighthouseServer(
                bind="[::]:0", min_replicas=control.size, join_timeout_ms=10_000, quorum_tick_ms=100
            )
            port = self._lighthouse.address().rpartition(":")[2]
            texts.append(f"http://{address}:{port}")
        lighthouse = gather_texts(control, "".join(texts).encode(), torch.device("cpu"))[0].decode()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=control.size,
            use_async_quorum=False,
            timeout=_TIMEOUT,
            quorum_timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            replica_id=f"worker_{control.rank}",
            hostname=address,
            init_sync=False,
        )
        self._period = period
        self.around: AbstractContextManager[Any] | None = None

    def update(self) -> None:
        """The optimizer's step, with the library's hooks on it."""
        due = (self.step + 1) % self._period == 0
        if due:
            with self.waiting():
                super().update()
            self.count_all_reduce(self.nbytes)
        else:
            super().update()

    def _state(self) -> dict[str, Any]:
        return {"model": self.network.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.network.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class _Torchft(LibraryMethod):
    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Start a manager and put the library's context around training."""
        engine = TorchftEngine(model, optimizer, control, self.period)
        engine.around = self.context(engine.manager, model, optimizer)
        engine.around.__enter__()
        return engine

    @abstractmethod
    def context(self, manager: Manager, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """The library's context."""


@dataclass(frozen=True)
class TorchftLocalSGD(_Torchft):
    """Parameters are averaged every `period` steps."""

    period: int = 8

    name = "torchft-local-sgd"
    paper = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767"

    def context(self, manager: Manager, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """As in `examples/localsgd`."""
        return LocalSGD(manager, model, optimizer, sync_every=self.period)


@dataclass(frozen=True)
class TorchftDiLoCo(_Torchft):
    """An outer optimizer, SGD with Nesterov momentum 0.9, steps every `period` steps.

    Args:
        period: steps between two of a fragment's outer steps.
        lr: of the outer optimizer.
        fragments: the model in so many parts, whose outer steps are spread over the period.
        delay: steps from the launch of a fragment's average to its outer step.
        alpha: weight of a worker's own parameters in what follows the outer step.
    """

    period: int = 32
    lr: float = 0.7
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    name = "torchft-diloco"
    paper = "Douillard et al., DiLoCo, 2023, arXiv:2311.08105"

    def context(self, manager: Manager, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[Any]:
        """As in `examples/diloco`."""
        parts = [model] if self.fragments == 1 else fragments_of(model, self.fragments)
        outers = [SGD(part.parameters(), lr=self.lr, momentum=0.9, nesterov=True) for part in parts]
        return DiLoCo(
            manager,
            parts,
            optimizer,
            outers,
            sync_every=self.period,
            fragment_sync_delay=self.delay,
            fragment_update_alpha=self.alpha,
        )


def fragments_of(model: nn.Module, count: int) -> list[nn.Module]:
    """The layers of a model in order, in so many parts of about as many parameters."""
    layers = [each for child in model.children() for each in (child if isinstance(child, nn.ModuleList) else [child])]
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    parts, before, whole = [nn.ModuleList() for _ in range(count)], 0, sum(sizes)
    for layer, size in zip(layers, sizes, strict=True):
        # By the middle of each layer.
        parts[min(count - 1, int(count * (before + size / 2) / whole))].append(layer)
        before += size
    return list(parts)
