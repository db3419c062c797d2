# SPDX-License-Identifier: Apache-2.0
"""Stop at any moment, continue with `--resume`, and end with bit for bit the parameters of an uninterrupted run.

First:  python examples/resume.py --folder runs/resume --steps 30
Then:   python examples/resume.py --folder runs/resume --steps 60 --resume

Both work under torchrun too, with the same number of workers both times.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire
from thinwire.lab import tasks


def main() -> None:
    """Train from the start or from the newest checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/resume"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    task = tasks.load("digits")
    model = task.model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    worker = thinwire.attach(model, optimizer, thinwire.SlowMo(base=thinwire.PushSum(), period=12))
    rank, size = worker.comm.rank, worker.comm.size
    shard = task.shards(size)[rank]

    if options.resume:
        scheduler.load_state_dict(worker.load(options.folder)["scheduler"])
    first = worker.step
    while worker.step < options.steps:
        task.loss(model, task.batch(shard, worker.step, batch_size=32, seed=0, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if worker.step % 10 == 0:
            worker.save(options.folder, extra={"scheduler": scheduler.state_dict()})

    with worker.consensus():
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if rank == 0:
        print(f"steps {first} to {worker.step}, parameters {digest[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
