# SPDX-License-Identifier: Apache-2.0
"""Your own strategy in twenty lines, compared with the one it is derived from.

Four workers as threads:  python examples/own_strategy.py
Two processes:            torchrun --standalone --nproc-per-node 2 examples/own_strategy.py
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

import thinwire
from thinwire.lab import tasks
from thinwire.methods.reduce.compressed_all_reduce import mean_

# own strategy: begin


@thinwire.registered
class InTurn(thinwire.Strategy):
    """Average one part of the parameters at each step, the parts in turn.

    Every parameter is averaged once in `parts` steps, and as many bytes are sent, as with LocalSGD(period=parts); but
    in a small message at each step instead of a large one every `parts` steps.
    """

    parts: int = 8

    waits = "every step, all workers wait for the slowest one and for a mean of one part of the parameters"

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise thinwire.ConfigError(f"parts={self.parts}: must be at least 1, to average all at each step")

    def after_step(self, r: thinwire.Replica) -> None:
        """Average this step's part."""
        mean_(r.comm, r.x.tensor_split(self.parts)[r.step % self.parts]).wait()


# own strategy: end


@dataclass(frozen=True)
class Outcome:
    """The results of one worker's run."""

    rank: int
    accuracy: float
    payload_bytes: float
    messages: int


def train(strategy: thinwire.Strategy, comm: thinwire.Comm, *, steps: int) -> Outcome:
    """Train on digits, and evaluate the consensus model."""
    torch.set_num_threads(1)
    task = tasks.load("digits")
    model = task.model(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm)
    shard = task.shards(comm.size)[comm.rank]
    before = comm.meter.payload_bytes, comm.meter.messages
    for step in range(steps):
        task.loss(model, task.batch(shard, step, batch_size=16, seed=0, rank=comm.rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    payload_bytes, messages = comm.meter.payload_bytes - before[0], comm.meter.messages - before[1]
    with worker.consensus():
        accuracy = task.evaluate(model).metric
    return Outcome(comm.rank, accuracy, payload_bytes, messages)


def run(strategy: thinwire.Strategy, *, steps: int = 80) -> Outcome:
    """Train on the processes that torchrun started, else on four threads; returns the results of one worker."""
    if dist.is_initialized():
        return train(strategy, thinwire.GroupComm(), steps=steps)
    return thinwire.run_threads(4, lambda comm: train(strategy, comm, steps=steps))[0]


def main() -> None:
    """Train with both strategies."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for strategy in (thinwire.LocalSGD(period=8), InTurn(parts=8)):
        outcome = run(strategy)
        if outcome.rank == 0:
            kilobytes = outcome.payload_bytes / 1e3
            print(f"{strategy}: accuracy {outcome.accuracy:.1%}, {kilobytes:.0f} kB in {outcome.messages} messages")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
