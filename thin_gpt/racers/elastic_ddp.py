# SPDX-License-Identifier: Apache-2.0
"""Averaged gradients on plain torch.distributed that survive a killed worker: an example for `submit --elastic`."""

import os
import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def all_reduced(x):
    """Sum in place over all workers; False if one is lost. The error goes, or it would keep connections open."""
    try:
        dist.all_reduce(x)
    except RuntimeError:
        return False
    return True


class Racer:
    """After a loss, the others wait for the new worker, and all continue in a new process group."""

    sent = 0.0
    progress = 0

    def setup(self, model, optimizer):
        """Connect to the store of rank 0, and meet the others."""
        self.model, self.optimizer = model, optimizer
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.store = TCPStore(address, port, is_master=self.rank == 0, wait_for_workers=False)
        self.meet(self.store.add("joined", 1 if os.environ["THIN_GPT_JOINING"] else 0))

    def meet(self, joined):
        """Make a process group, in which all take the state of a worker with the most steps."""
        self.joined, store = joined, PrefixStore(f"{joined}", self.store)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=600)
        )
        steps = [None] * self.size
        dist.all_gather_object(steps, self.progress)
        source = steps.index(max(steps))
        if self.progress == steps[source] == 0:
            return  # all start with the same parameters
        state = [self.model.state_dict(), self.optimizer.state_dict()]
        dist.broadcast_object_list(state, source)
        if self.rank == source:
            self.sent += 3 * (self.size - 1) * sum(p.nbytes for p in self.model.parameters())
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])
        self.progress = steps[source]

    def step(self, loss):
        """Average the gradients, and update. A worker that gets the result of this step from another skips it."""
        loss.backward()
        before, parameters = self.progress, list(self.model.parameters())
        own = parameters_to_vector(p.grad for p in parameters) / self.size
        while self.progress == before:
            mean = own.clone()
            if not all_reduced(mean):
                self.wait_for_another()
                continue
            vector_to_parameters(mean, (p.grad for p in parameters))
            self.optimizer.step()
            self.progress += 1
            self.sent += 2 * (self.size - 1) / self.size * mean.nbytes

    def wait_for_another(self):
        """Leave the process group, so that the others notice too, and meet when the new worker has come."""
        dist.destroy_process_group()
        while (joined := self.store.add("joined", 0)) == self.joined:
            time.sleep(0.1)
        self.meet(joined)

    def finish(self):
        """Do nothing: all workers have the same parameters."""
