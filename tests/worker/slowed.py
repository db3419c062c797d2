# SPDX-License-Identifier: Apache-2.0
"""A worker of a group in which one is slow; as a process it prints which one it names after two rounds."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from torch import nn

import thinwire

PERIOD = 4
USUAL, LONG = 0.004, 0.03


class Slowed(nn.Module):
    """A linear layer whose forward pass takes a given time."""

    def __init__(self, seconds: float, size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size, bias=False)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layer(x)


def train(worker: thinwire.Worker, data_seconds: float, *, until: int) -> None:
    size = worker.model.get_submodule("layer").in_features
    while worker.step < until:
        time.sleep(data_seconds)
        worker.model(torch.ones(1, size)).sum().backward()
        worker.optimizer.step()
        worker.optimizer.zero_grad()


def main(cause: str, rank: int) -> None:
    torch.set_num_threads(1)
    slow = int(os.environ["RANK"]) == rank
    model = Slowed(LONG if slow and cause == "compute" else USUAL, size=500)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with thinwire.attach(model, optimizer, thinwire.LocalSGD(period=PERIOD), timeout=60) as worker:
        data = LONG if slow and cause == "data" else USUAL
        train(worker, data, until=2 * PERIOD)
        found = worker.stats().slow_worker
        print(json.dumps({"rank": found.rank, "cause": found.cause} if found else {}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
