# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: gradients are averaged at every step."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Racer:
    """DDP with its defaults."""

    sent = 0.0

    def setup(self, model, optimizer):
        """Wrap the model, whose loss is then computed through the wrapper."""
        self.optimizer, size = optimizer, dist.get_world_size()
        self.bytes = 2 * (size - 1) / size * sum(p.nbytes for p in model.parameters())
        return DistributedDataParallel(model)

    def step(self, loss):
        """Average the gradients in the backward pass, and update."""
        loss.backward()
        self.optimizer.step()
        self.sent += self.bytes

    def finish(self):
        """Do nothing: all workers have the same parameters."""
