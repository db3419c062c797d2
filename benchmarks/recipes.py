# SPDX-License-Identifier: Apache-2.0
"""Recipes for thin links against DistributedDataParallel, in turns in the same processes; the 6 M GPT.

thinwire emulate --workers 4 --link 100mbit -- python -m benchmarks.recipes [ROUNDS]
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

PERIOD = 8
RECIPES = {
    "LocalSGD, 4 bits": f"LocalSGD(period={PERIOD}, codec=ErrorFeedback(Nearest(bits=4)))",
    "OverlapLocalSGD, 4 bits": f"OverlapLocalSGD(period={PERIOD}, codec=ErrorFeedback(Nearest(bits=4)))",
}


def main(rounds: str = "3", *, batch_size: int = 4) -> None:
    """Run one worker: a block is one period."""
    start()
    task, rank = tasks.load("text"), int(os.environ["RANK"])
    shard = task.shards(dist.get_world_size(), split="iid", seed=0)[rank]
    batch = task.batch(shard, 0, batch_size=batch_size, seed=0, rank=rank)

    def contender(recipe: str | None) -> Step:
        model: nn.Module = task.model("6m", seed=0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if recipe is None:
            model = DistributedDataParallel(model)
        else:
            thinwire.attach(model, optimizer, thinwire.parse(recipe))

        def once() -> None:
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            optimizer.step()

        return once

    contenders = {"ddp": contender(None)} | {name: contender(recipe) for name, recipe in RECIPES.items()}
    report(take_turns(contenders, rounds=int(rounds), steps=PERIOD, warm_up=1), baseline="ddp")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
