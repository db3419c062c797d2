# SPDX-License-Identifier: Apache-2.0
"""Compressed strategies, compared with steps without communication and with DistributedDataParallel; the 6 M GPT.

python -m benchmarks.compressed [--quick]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks.paired import Step, Turns, run_in_turns, start, take_turns, with_seconds
from thinwire.lab import tasks
from thinwire.lab.emulate import available

WORKERS = 4
LINKS: tuple[str | None, ...] = ("100mbit", "1gbit", None)
Row = tuple[str, str, str, str]

# (numerator, denominator, label). The limits are relative to the step without communication over 100 Mbit, and to DDP
# over 1 Gbit. LAMB computes longer than AdamW, so that 1-bit LAMB is compared with both. Signs of gradients need SGD.
RATIOS = (
    ("lamb", "lamb alone", "OneBitLamb, compressed: step / step alone"),
    ("codes", "sgd alone", "AllReduce(OneBit): step / step alone"),
    ("ddp lamb", "lamb", "DDP's step with LAMB / OneBitLamb's, compressed"),
    ("ddp", "lamb", "DDP's step with AdamW / OneBitLamb's, compressed"),
    ("ddp sgd", "codes", "DDP's step with SGD / AllReduce(OneBit)'s"),
)
BARS = {
    ("100mbit", "lamb alone"): "1.3",
    ("100mbit", "sgd alone"): "1.3",
    ("1gbit", "lamb"): "1.4",
    ("1gbit", "codes"): "1.4",
}


def contender(task: Any, name: str) -> Step:
    """One training step after another, on one batch of 4 windows; 1-bit LAMB is in its second stage, with overlap."""
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shard = task.shards(workers, split="iid", seed=0)[rank]
    batch = task.batch(shard, 0, batch_size=4, seed=0, rank=rank)
    model = task.model("6m", seed=0)
    optimizer: torch.optim.Optimizer
    if "lamb" in name:
        optimizer = thinwire.OneBitLamb(model.parameters(), lr=1e-3)
    elif "sgd" in name or name == "codes":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    wrapped = DistributedDataParallel(model) if name.startswith("ddp") else model
    if name == "lamb":
        thinwire.attach(model, optimizer, thinwire.CompressedMomentum(warmup_steps=1, overlap=True))
    elif name == "codes":
        thinwire.attach(model, optimizer, thinwire.AllReduce(codec=thinwire.ErrorFeedback(thinwire.OneBit())))

    def once() -> None:
        optimizer.zero_grad()
        task.loss(wrapped, batch).backward()
        optimizer.step()
        if isinstance(optimizer, thinwire.OneBitLamb) and wrapped is model:
            optimizer.freeze()

    return once


def work(rounds: int, *, steps: int = 2) -> None:
    """One worker: run all contenders in alternation; rank 0 writes seconds a step, round by round, as JSON."""
    start()
    task, names = tasks.load("text"), ("lamb alone", "sgd alone", "ddp lamb", "ddp sgd", "ddp", "lamb", "codes")
    turns = take_turns({name: contender(task, name) for name in names}, rounds=rounds, steps=steps, warm_up=2)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({name: each.wall for name, each in turns.items()}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def measured(link: str | None, rounds: int) -> dict[str, Turns]:
    """The contenders' turns over one link."""
    found = run_in_turns("compressed", WORKERS, "work", str(rounds), link=link)
    return {name: Turns(wall=each) for name, each in found.items()}


def rows_of(link: str | None, turns: Mapping[str, Turns]) -> list[Row]:
    """The ratios over one link, formed within each round, with their quartiles."""
    rows: list[Row] = []
    for over, under, what in RATIOS:
        figures = with_seconds(turns[over].wall, turns[under].wall)
        rows.append((f"{what}, {link or 'unshaped'}", *figures, BARS.get((link or "", under), "")))
    return rows


def rows(*, quick: bool, links: Sequence[str | None] = LINKS) -> Iterator[Row]:
    """The whole table, row by row; over links where they can be emulated."""
    for link in links if available() is None else (None,):
        yield from rows_of(link, measured(link, 4 if quick else 12))


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or run one worker."""
    if arguments[:1] == ["work"]:
        work(int(arguments[1]))
        return
    for row in chain((("what", "median", "quartiles", "bar"), ("---",) * 4), rows(quick="--quick" in arguments)):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
