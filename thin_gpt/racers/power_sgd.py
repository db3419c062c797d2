# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel with PyTorch's PowerSGD hook."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel


class Racer:
    """DDP with PowerSGD; the first `start` steps send whole gradients."""

    sent = 0.0

    def __init__(self, rank=4, start=10):
        self.rank, self.start = rank, start

    def setup(self, model, optimizer):
        """Wrap the model in one bucket: over Gloo the hook's messages of several would be mixed up."""
        self.optimizer, size = optimizer, dist.get_world_size()
        self.share = 2 * (size - 1) / size
        nbytes = sum(p.nbytes for p in model.parameters())
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1 + nbytes / 2**20)
        state = PowerSGDState(None, self.rank, self.start)

        def counted(state, bucket):
            whole, before = state.iter < self.start, state.total_numel_after_compression
            result = powerSGD_hook(state, bucket)
            numbers = bucket.buffer().numel() if whole else state.total_numel_after_compression - before
            self.sent += self.share * numbers * bucket.buffer().element_size()
            return result

        wrapped.register_comm_hook(state, counted)
        return wrapped

    def step(self, loss):
        """Average the gradients in the backward pass, and update."""
        loss.backward()
        self.optimizer.step()

    def finish(self):
        """Do nothing: all workers have the same parameters."""
