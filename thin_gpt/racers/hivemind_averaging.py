# SPDX-License-Identifier: Apache-2.0
"""hivemind's DecentralizedAverager: https://learning-at-home.readthedocs.io/en/latest/modules/averaging.html.

Workers train alone and average their parameters, in half precision on the way, every `period` steps.
"""

import multiprocessing
import os

import hivemind
import torch
import torch.distributed as dist
from hivemind.compression import Float16Compression


class Racer:
    """An averager in a process of its own, which each worker waits for."""

    sent = 0.0

    def __init__(self, period=32):
        self.period, self.count = period, 0

    def setup(self, model, optimizer):
        """Join the others' DHT."""
        self.model, self.optimizer = model, optimizer
        # Its processes hold objects that only a fork inherits.
        multiprocessing.set_start_method("fork", force=True)
        self.size, rank = dist.get_world_size(), dist.get_rank()
        self.bytes = 2 * (self.size - 1) / self.size * sum(p.nbytes for p in model.parameters())
        here = [f"/ip4/{os.environ['THIN_GPT_ADDRESS']}/tcp/0"]
        first = hivemind.DHT(host_maddrs=here, start=True) if rank == 0 else None
        told = [[str(each) for each in first.get_visible_maddrs()] if first else []]
        dist.broadcast_object_list(told)
        self.dht = first or hivemind.DHT(host_maddrs=here, initial_peers=told[0], start=True)
        self.averager = hivemind.averaging.DecentralizedAverager(
            [p.detach().clone() for p in model.parameters()],
            self.dht,
            start=True,
            prefix="thin-gpt",
            target_group_size=self.size,
            min_group_size=self.size,
            min_matchmaking_time=2.0,
            request_timeout=1.0,
            compression=Float16Compression(),
            allow_state_sharing=False,
        )

    def step(self, loss):
        """Update, and average the parameters when it is time."""
        loss.backward()
        self.optimizer.step()
        self.count += 1
        if self.count % self.period == 0:
            self.average()

    @torch.no_grad()
    def average(self):
        """A round with all workers."""
        parameters = list(self.model.parameters())
        with self.averager.get_tensors() as tensors:
            for tensor, parameter in zip(tensors, parameters, strict=True):
                tensor.copy_(parameter)
        met = self.averager.step(timeout=300.0)
        if met is None or len(met) != self.size:
            raise RuntimeError(f"a round met {len(met or ())} of {self.size} workers")
        with self.averager.get_tensors() as tensors:
            for tensor, parameter in zip(tensors, parameters, strict=True):
                parameter.copy_(tensor)
        self.sent += self.bytes / 2

    def finish(self):
        """Average in full precision, so that all have the same parameters."""
        for p in self.model.parameters():
            dist.all_reduce(p.data.div_(self.size))
        self.sent += self.bytes
        self.averager.shutdown()
        self.dht.shutdown()
