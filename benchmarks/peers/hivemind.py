# SPDX-License-Identifier: Apache-2.0
"""hivemind's DecentralizedAverager: https://learning-at-home.readthedocs.io/en/latest/modules/averaging.html.

Workers train on their own and average their parameters, in half precision on the way, every `period` steps; each waits
for the round, so that nothing depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import hivemind
import torch
from hivemind.compression import Float16Compression
from torch import nn
from torch.optim import Optimizer

from benchmarks.peers.base import Held, LibraryEngine, LibraryMethod, own_address
from thinwire import Comm, CommError
from thinwire.lab.runs.baselines import BaselineEngine
from thinwire.worker.handshake import gather_texts

_ROUND_SECONDS = 120.0


class HivemindEngine(LibraryEngine):
    """A model, and an averager in a process of its own."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, control: Comm, period: int) -> None:
        super().__init__(Held(model), optimizer, control)
        self._period = period
        here = [f"/ip4/{own_address()}/tcp/0"]
        first = hivemind.DHT(host_maddrs=here, start=True) if control.rank == 0 else None
        own = "" if first is None else "\n".join(str(each) for each in first.get_visible_maddrs())
        peers = gather_texts(control, own.encode(), torch.device("cpu"))[0].decode().split("\n")
        self._dht = first or hivemind.DHT(host_maddrs=here, initial_peers=peers, start=True)
        self._parameters = list(model.parameters())
        self._averager = hivemind.averaging.DecentralizedAverager(
            [p.detach().clone() for p in self._parameters],
            self._dht,
            start=True,
            prefix="race",
            target_group_size=control.size,
            min_group_size=control.size,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            compression=Float16Compression(),
            allow_state_sharing=False,
        )
        self.average = self._average

    def _average(self) -> None:
        if (self.step + 1) % self._period:
            return
        with self.waiting(), torch.no_grad():
            with self._averager.get_tensors() as tensors:
                for tensor, parameter in zip(tensors, self._parameters, strict=True):
                    tensor.copy_(parameter)
            met = self._averager.step(timeout=_ROUND_SECONDS)
            if met is None or len(met) != self.control.size:
                raise CommError(f"hivemind: a round met {len(met or ())} of {self.control.size} workers")
            with self._averager.get_tensors() as tensors:
                for tensor, parameter in zip(tensors, self._parameters, strict=True):
                    parameter.copy_(tensor)
        self.count_all_reduce(self.nbytes // 2)


@dataclass(frozen=True)
class HivemindAveraging(LibraryMethod):
    """Parameters are averaged every `period` steps."""

    period: int = 32

    name = "hivemind-averaging"
    paper = "Ryabinin et al., Moshpit SGD, NeurIPS 2021, arXiv:2103.03239"

    def engine(self, model: nn.Module, optimizer: Optimizer, control: Comm) -> BaselineEngine:
        """Join the averager of the others."""
        return HivemindEngine(model, optimizer, control, self.period)
