# SPDX-License-Identifier: Apache-2.0
"""Makes a second pass over each batch, in which it updates too.

It does so after the steps that are replayed, or with `hidden` in all, past the model's hooks.
"""

from pathlib import Path

import torch

from thin_gpt.task import REPLAYED
from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    def __init__(self, hidden=False):
        self.hidden, self.count = hidden, 0

    def setup(self, model, optimizer):
        super().setup(model, optimizer)
        model.register_forward_hook(self.keep)
        self.seen = None

    def keep(self, model, inputs, output):
        self.seen = inputs[0]

    def step(self, loss):
        super().step(loss)
        self.count += 1
        if self.count <= REPLAYED and not self.hidden:
            return
        tokens = self.seen
        self.optimizer.zero_grad()
        model = self.model.forward if self.hidden else self.model
        again = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        again.backward()
        self.exchange()
        # Not the optimizer's step, whose calls are counted.
        with torch.no_grad():
            for p in self.model.parameters():
                p.sub_(p.grad, alpha=1e-3)
