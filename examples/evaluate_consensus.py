# SPDX-License-Identifier: Apache-2.0
"""Why to evaluate the consensus model: each worker sees only some of the digits, and averages with its neighbours.

Four workers as threads:  python examples/evaluate_consensus.py
Two processes:            torchrun --standalone --nproc-per-node 2 examples/evaluate_consensus.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

import thinwire
from thinwire.lab import tasks


def work(comm: thinwire.Comm) -> None:
    """Train one worker, then evaluate its own model and the consensus model."""
    torch.set_num_threads(1)
    task = tasks.load("digits")
    model = task.model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    worker = thinwire.attach(model, optimizer, thinwire.Gossip(thinwire.Ring()), comm=comm)
    shard = task.shards(comm.size, split="label")[comm.rank]
    for step in range(100):
        task.loss(model, task.batch(shard, step, batch_size=16, seed=0, rank=comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    own = torch.tensor(task.evaluate(model).metric)
    with worker.consensus():
        consensus = task.evaluate(model).metric
    accuracies = comm.all_gather(own).wait()
    if comm.rank == 0:
        each = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies)
        print(f"each worker's own model: {each}; the consensus model: {consensus:.1%}")


def main() -> None:
    """Run the workers."""
    if "RANK" not in os.environ:
        thinwire.run_threads(4, work)
        return
    dist.init_process_group("gloo")
    work(thinwire.GroupComm())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
