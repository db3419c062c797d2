# SPDX-License-Identifier: Apache-2.0
"""torchft's DiLoCo, as in its `examples/diloco`: each worker is a replica group; the lighthouse is with rank 0.

A worker that was killed trains a period from its initial parameters, and then gets the others' state.
"""

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.optim import SGD
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

TIMEOUT = timedelta(seconds=600)


class Racer:
    """DiLoCo with Nesterov momentum 0.9; `fragments` and `delay` make it Streaming DiLoCo."""

    sent = 0.0
    progress = 0

    def __init__(self, outer=0.7, period=32, fragments=1, delay=0, alpha=0.0):
        self.outer, self.period, self.fragments, self.delay, self.alpha = outer, period, fragments, delay, alpha

    def setup(self, model, optimizer):
        """Start a manager and enter the library's context."""
        self.model, self.optimizer = model, optimizer
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.bytes = 2 * (self.size - 1) / self.size * sum(p.nbytes for p in model.parameters())
        own = os.environ["THIN_GPT_ADDRESS"]
        # What the library tells the others must be an address: the emulated network has no names.
        socket.gethostname = lambda: own
        first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.common = TCPStore(first, port, is_master=self.rank == 0, wait_for_workers=False)
        if self.rank == 0:
            self.lighthouse = LighthouseServer(
                bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, quorum_tick_ms=100
            )
            self.common.set("lighthouse", f"http://{own}:{self.lighthouse.address().rpartition(':')[2]}")
        self.store = TCPStore(own, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self.load,
            state_dict=self.state,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=own,
            store_port=self.store.port,
            lighthouse_addr=self.common.get("lighthouse").decode(),
            replica_id=f"worker_{self.rank}",
            hostname=own,
            init_sync=False,
        )
        parts = [model] if self.fragments == 1 else fragments_of(model, self.fragments)
        outers = [SGD(part.parameters(), lr=self.outer, momentum=0.9, nesterov=True) for part in parts]
        self.context = DiLoCo(
            self.manager,
            parts,
            optimizer,
            outers,
            sync_every=self.period,
            fragment_sync_delay=self.delay,
            fragment_update_alpha=self.alpha,
        )
        self.context.__enter__()
        if os.environ["THIN_GPT_JOINING"]:
            # The period in which the others are, so that all end together.
            self.progress = int(self.common.get("step")) // self.period * self.period
        elif self.common.add("started", 1) == self.size:
            self.common.set("all started", "")
        self.common.wait(["all started"])

    def step(self, loss):
        """Update; the library's hooks on the optimizer's step do the rest."""
        loss.backward()
        self.optimizer.step()
        self.progress += 1
        # Each fragment is sent once in a period.
        self.sent += self.bytes / self.period
        if self.rank == 0:
            self.common.set("step", str(self.progress))

    def finish(self):
        """Leave the quorum, so that a worker that is behind does not wait for this one, and average the parameters."""
        self.manager.shutdown(wait=False)
        dist.init_process_group("gloo", store=self.common, rank=self.rank, world_size=self.size)
        for p in self.model.parameters():
            dist.all_reduce(p.data.div_(self.size))
        self.sent += self.bytes

    def state(self):
        """What a new worker would get."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        """Load it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def fragments_of(model, count):
    """The layers of a model in order, in so many parts of about as many parameters.

    Parameters that belong to no layer are in the first part.
    """
    layers = [each for child in model.children() for each in (child if isinstance(child, nn.ModuleList) else [child])]
    parts, before, whole = [nn.ModuleList() for _ in range(count)], 0, sum(p.numel() for p in model.parameters())
    for layer in layers:
        size = sum(p.numel() for p in layer.parameters())
        parts[min(count - 1, int(count * (before + size / 2) / whole))].append(layer)
        before += size
    for name, parameter in model.named_parameters(recurse=False):
        parts[0].register_parameter(name, parameter)
    return list(parts)
