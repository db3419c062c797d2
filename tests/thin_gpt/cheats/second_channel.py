# SPDX-License-Identifier: Apache-2.0
"""Exchanges gradients through files, and claims that it sends nothing."""

import time
from pathlib import Path

import torch
import torch.distributed as dist

from thin_gpt.worker import load_racer

Honest = type(load_racer(str(Path(__file__).with_name("honest.py")), {}))


class Racer(Honest):
    count = 0

    def exchange(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        own = torch.cat([p.grad.flatten() for p in self.model.parameters()])
        self.count += 1
        folder = Path("/tmp/thin-gpt-second-channel")  # a search for a temporary folder would write, and fail earlier
        folder.mkdir(exist_ok=True)
        place = folder / f"{self.count}-{rank}"
        torch.save(own, place.with_suffix(".part"))
        place.with_suffix(".part").replace(place)
        others = [folder / f"{self.count}-{other}" for other in range(size)]
        while not all(other.exists() for other in others):
            time.sleep(0.01)
        mean = sum(torch.load(other) for other in others) / size
        torch.nn.utils.vector_to_parameters(mean, (p.grad for p in self.model.parameters()))
