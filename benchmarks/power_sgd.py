# SPDX-License-Identifier: Apache-2.0
"""`AllReduce(PowerSGD(rank))`, compared with PyTorch's PowerSGD hook for DDP; a GPT of 6 M parameters.

python -m benchmarks.power_sgd [--quick]       seconds of a step over 100 Mbit, and of one without communication
python -m benchmarks.power_sgd losses FOLDER   held-out losses of 0.5 M parameters after 240 steps, three seeds

The hook sends whole gradients in its first ten steps; "dense first" is ours with a switch that does so too. The bar for
losses is the range of the hook's over seeds. Every run is kept in the folder, and the command goes on with those that
are missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks.paired import Step, run_in_turns, start, take_turns, with_seconds
from benchmarks.sparse import run
from thinwire.core.statistics import spread
from thinwire.lab import tasks
from thinwire.lab.emulate import available

WORKERS, RANKS = 4, (1, 2, 4)
STEPS, SEEDS, DENSE = 240, (0, 1, 2), 10


def contender(task: Any, name: str) -> Step:
    """One training step after another, on one batch of 4 windows, compressed from the third on."""
    rank = int(os.environ["RANK"])
    batch = task.batch(task.shards(WORKERS, split="iid", seed=0)[rank], 0, batch_size=4, seed=0, rank=rank)
    model = task.model("6m", seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapped, (kind, columns) = model, name.split()
    if kind == "ours":
        thinwire.attach(model, optimizer, thinwire.AllReduce(thinwire.PowerSGD(int(columns))))
    elif kind == "torch":
        # One bucket: its later messages are sent from the thread that received the earlier ones, so that over Gloo
        # those of several buckets would be matched wrongly.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=64)
        wrapped.register_comm_hook(PowerSGDState(None, int(columns), start_powerSGD_iter=2), powerSGD_hook)

    def once() -> None:
        optimizer.zero_grad()
        task.loss(wrapped, batch).backward()
        optimizer.step()

    return once


def work(rounds: int) -> None:
    """One worker: run all contenders in alternation; rank 0 writes seconds a step, round by round, as JSON."""
    start()
    task = tasks.load("text")
    names = ["alone 0", *(f"{kind} {rank}" for rank in RANKS for kind in ("ours", "torch"))]
    turns = take_turns({name: contender(task, name) for name in names}, rounds=rounds, steps=2, warm_up=4)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({name: each.wall for name, each in turns.items()}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def losses(folder: Path) -> None:
    """Train with both, seed by seed, and print a Markdown table."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = {"task": "text", "model": "0.5m", "workers": WORKERS, "batch_size": 4, "eval_limit": 64, "steps": STEPS}
    found: dict[str, list[float]] = {}
    for seed in SEEDS:
        for rank in RANKS:
            ours = f"AllReduce(PowerSGD(rank={rank}))"
            named = {
                f"ours {rank}": {"strategy": ours},
                f"dense first {rank}": {"strategy": "AllReduce()", "switch": f"{DENSE}: {ours}"},
                f"torch {rank}": {"strategy": f"ddp+powersgd(rank={rank})"},
            }
            for name, recipe in named.items():
                home = folder / f"{name.replace(' ', '-')}-{seed}"
                summary = run(home, {**shared, **recipe, "seed": seed})
                found.setdefault(name, []).append(summary["eval_loss"])
    print("| rank | ours | ours, dense first | torch's hook | ours over the hook's | dense first over the hook's |")
    print("|---|---|---|---|---|---|")
    for rank in RANKS:
        each = [found[f"{name} {rank}"] for name in ("ours", "dense first", "torch")]
        cells = [spread(losses).words(".4f", of="mean") for losses in each]
        for ours in each[:2]:
            cells.append(", ".join(f"{own / hook:.3f}" for own, hook in zip(ours, each[2], strict=True)))
        print(f"| {rank} | {' | '.join(cells)} |")


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or run one worker."""
    if arguments[:1] == ["work"]:
        work(int(arguments[1]))
        return
    if arguments[:1] == ["losses"]:
        losses(Path(arguments[1]))
        return
    if reason := available():
        raise SystemExit(reason)
    turns = run_in_turns("power_sgd", WORKERS, "work", "3" if "--quick" in arguments else "12", link="100mbit")
    print("| what, 100 Mbit | median | quartiles | bar |\n|---|---|---|---|")
    for rank in RANKS:
        for over, bar in ((f"torch {rank}", "1.0"), ("alone 0", "")):
            median, rest = with_seconds(turns[f"ours {rank}"], turns[over])
            print(f"| rank {rank}: step / {over}'s | {median} | {rest} | {bar} |")


if __name__ == "__main__":
    main(sys.argv[1:])
