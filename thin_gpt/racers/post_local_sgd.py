# SPDX-License-Identifier: Apache-2.0
"""PyTorch's post-local SGD: gradients are averaged for the first steps, then the parameters every few steps."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel


class Racer:
    """DDP with the hook and the averager of PyTorch's tutorial."""

    sent = 0.0

    def __init__(self, period=8, start=100):
        self.period, self.start = period, start

    def setup(self, model, optimizer):
        """Wrap the model, register the hook, make the averager."""
        self.model, self.optimizer, size = model, optimizer, dist.get_world_size()
        self.bytes = 2 * (size - 1) / size * sum(p.nbytes for p in model.parameters())
        wrapped = DistributedDataParallel(model)
        state = PostLocalSGDState(None, None, self.start, post_local_gradient_allreduce=False)
        wrapped.register_comm_hook(state, post_localSGD_hook)
        self.averager, self.hook = PeriodicModelAverager(self.period, warmup_steps=self.start), state
        return wrapped

    def step(self, loss):
        """Average the gradients at first, update, and average the parameters when it is time."""
        before = self.hook.iter
        loss.backward()
        if before < self.start:
            self.sent += self.bytes
        self.optimizer.step()
        since = self.averager.step - self.averager.warmup_steps
        self.averager.average_parameters(self.model.parameters())
        if since >= 0 and since % self.period == 0:
            self.sent += self.bytes

    def finish(self):
        """Average the parameters once more."""
        for p in self.model.parameters():
            dist.all_reduce(p.data.div_(dist.get_world_size()))
        self.sent += self.bytes
