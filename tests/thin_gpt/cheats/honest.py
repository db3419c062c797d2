# SPDX-License-Identifier: Apache-2.0
"""Averages gradients, and claims the bytes of an all-reduce."""

import torch.distributed as dist


class Racer:
    sent = 0.0

    def setup(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def step(self, loss):
        loss.backward()
        self.exchange()
        self.optimizer.step()

    def exchange(self):
        size = dist.get_world_size()
        for p in self.model.parameters():
            dist.all_reduce(p.grad.div_(size))
            self.sent += 2 * (size - 1) / size * p.nbytes

    def finish(self):
        pass
