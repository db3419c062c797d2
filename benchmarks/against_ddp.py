# SPDX-License-Identifier: Apache-2.0
"""AllReduce() against torch's DistributedDataParallel, and attach on one worker against the bare loop.

torchrun --nproc-per-node 4 -m benchmarks.against_ddp [ROUNDS [MILLIONS [elastic|- [BATCH]]]]
thinwire emulate --workers 4 --link 1gbit -- python -m benchmarks.against_ddp
python -m benchmarks.against_ddp
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks.paired import Step, report, start, take_turns
from thinwire.lab import tasks
from thinwire.lab.tasks.models.base import build
from thinwire.lab.tasks.models.gpt import GPT, GPTSize

# By about how many million parameters they have.
SIZES = {"0.5": GPTSize(4, 96, 3), "2": GPTSize(6, 160, 5), "6": GPTSize(8, 256, 4), "20": GPTSize(8, 448, 7)}


def main(rounds: str = "10", size: str = "6", elastic: str = "-", batch_size: str = "4", *, steps: int = 4) -> None:
    """Run the pair that suits the number of workers."""
    start()
    task = tasks.load("text")
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shard = task.shards(workers, split="iid", seed=0)[rank]
    batch = task.batch(shard, 0, batch_size=int(batch_size), seed=0, rank=rank)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def once() -> None:
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()

        return once

    def contender(wrap: str) -> Step:
        model: nn.Module = build(lambda: GPT(SIZES[size]), seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if wrap == "ddp":
            model = DistributedDataParallel(model)
        elif wrap != "bare":
            thinwire.attach(model, optimizer, thinwire.AllReduce(), elastic=wrap == "elastic")
        return step(model, optimizer)

    baseline = "ddp" if workers > 1 else "bare"
    names = (baseline, "thinwire", "elastic")[: 3 if elastic == "elastic" else 2]
    seconds = take_turns({name: contender(name) for name in names}, rounds=int(rounds), steps=steps)
    report(seconds, baseline=baseline)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
