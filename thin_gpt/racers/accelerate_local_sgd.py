# SPDX-License-Identifier: Apache-2.0
"""Accelerate's LocalSGD: https://huggingface.co/docs/accelerate/usage_guides/local_sgd."""

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD


class Racer:
    """The loop of the guide."""

    sent = 0.0

    def __init__(self, period=8):
        self.period, self.count = period, 0

    def setup(self, model, optimizer):
        """Prepare the model and the optimizer."""
        self.model, size = model, dist.get_world_size()
        self.bytes = 2 * (size - 1) / size * sum(p.nbytes for p in model.parameters())
        self.accelerator = Accelerator(cpu=True)
        prepared, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.local = LocalSGD(accelerator=self.accelerator, model=prepared, local_sgd_steps=self.period)
        self.local.__enter__()
        return prepared

    def step(self, loss):
        """Update, and average the parameters when it is time."""
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.count += 1
        self.local.step()
        if self.count % self.period == 0:
            self.sent += self.bytes

    def finish(self):
        """Leave the context, which averages once more."""
        self.local.__exit__(None, None, None)
        self.sent += self.bytes
