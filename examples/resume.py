"""Stop at any moment, go on with `--resume`, and end where an uninterrupted run ends, bit for bit.

First:  python examples/resume.py --folder runs/resume --steps 30
Then:   python examples/resume.py --folder runs/resume --steps 60 --resume

Both work under torchrun as well, with as many workers the second time as the first.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist

import thinwire
from thinwire import tasks


def main() -> None:
    """Train from the beginning or from the newest checkpoint."""
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=Path("runs/resume"))
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--resume", action="store_true")
    asked = options.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")

    task = tasks.load("digits")
    model = task.model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
    worker = thinwire.attach(model, optimizer, thinwire.SlowMo(base=thinwire.PushSum(), period=12))
    rank, size = worker.comm.rank, worker.comm.size
    shard = task.shards(size)[rank]

    if asked.resume:
        scheduler.load_state_dict(worker.load(asked.folder)["scheduler"])
    first = worker.step
    while worker.step < asked.steps:
        task.loss(model, task.batch(shard, worker.step, batch_size=32, seed=0, rank=rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if worker.step % 10 == 0:
            worker.save(asked.folder, extra={"scheduler": scheduler.state_dict()})

    with worker.consensus():
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    if rank == 0:
        print(f"steps {first} to {worker.step}, parameters {digest[:16]}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
