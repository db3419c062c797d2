# SPDX-License-Identifier: Apache-2.0
"""Fleets of unequal speed: how much of their summed speed is used, and what the loss is at equal tokens.

    python -m benchmarks.unequal speed [--recipe RECIPE ...] [--link 100mbit]      about two minutes a recipe
    python -m benchmarks.unequal loss  [--recipe RECIPE ...] [--seeds 0 1 2]       about two minutes a recipe and seed

The rule, which was written before any run:

- Four workers, of which rank 3 is four times slower. The GPT of half a million parameters on `text`, 4 sequences a
  worker and step, AdamW at 1e-3, a thread a worker. Periods are 32 steps.
- `speed`: every worker is a process in a network namespace of its own, behind the link. A step's own length is fixed,
  so that the workers do not compete for the machine's cores: each computes, and sleeps until 0.25 s after its step's
  start, rank 3 until 1 s, before it calls the optimizer. The summed speed is therefore 3 / 0.25 + 1 = 13 batches a
  second. Told is how many batches all workers took in the window, over its seconds and over 13. The window begins with
  the first round that ends after 20 s and ends with the first one that ends 60 s later, by rank 0's steps; for
  `AllReduce()` every step is a round. The bar is 0.90, for `Paced` over LocalSGD, SlowMo and DiLoCo; `AllReduce()` and
  `LocalSGD` without it are shown beside them.
- `loss`: threads of one process, where `steps` fixes what `Paced` measures on machines: (32, 32, 32, 8). The equal
  fleet is four workers under the base alone. Both take 1,664 batches: 16 rounds of 104, and 13 of 128. The loss is of
  the consensus on the same 256 held-out windows. Told is the unequal fleet's loss over the equal one's, less one, for
  each seed, and the mean. The bar is 1 %.

Each result is a line of JSON, and of benchmarks/results/survival/NAME.jsonl with `--save NAME`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import thinwire
from benchmarks.against_ddp import SIZES
from thinwire.lab import tasks
from thinwire.lab.emulate import Network, parse_links
from thinwire.lab.emulate.launch import Workers
from thinwire.lab.tasks.models.base import build
from thinwire.lab.tasks.models.gpt import GPT

RESULTS = Path(__file__).parent / "results" / "survival"
BASES = ("LocalSGD(period=32)", "SlowMo(period=32)", "DiLoCo(period=32)")
WORKERS, BATCH, PERIOD, LR = 4, 4, 32, 1e-3
LENGTHS = (0.25, 0.25, 0.25, 1.0)
UNEQUAL_STEPS = (32, 32, 32, 8)
BATCHES = 1664
WARM_SECONDS, WINDOW_SECONDS, MOST_SECONDS = 20.0, 60.0, 200.0


def model_of(seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    """The model and its optimizer."""
    model = build(lambda: GPT(SIZES["0.5"]), seed=seed)
    return model, torch.optim.AdamW(model.parameters(), lr=LR)


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(recipe: str, link: str) -> dict[str, Any]:
    """How much of the summed speed a recipe uses."""
    command = [sys.executable, "-m", "benchmarks.unequal", "worker", "--recipe", recipe]
    ends: dict[int, list[tuple[float, int]]] = {rank: [] for rank in range(WORKERS)}

    def read(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("["):
            at, step = json.loads(line)
            ends[rank].append((at, step))
        elif "Error" in line:
            print(f"rank {rank}: {line}", file=sys.stderr)

    period = 1 if recipe.startswith("AllReduce") else PERIOD

    def rounds() -> list[float]:
        return [at for at, step in ends[0] if step % period == 0]

    def window() -> tuple[float, float] | None:
        first = next((at for at in rounds() if at > ends[0][0][0] + WARM_SECONDS), None)
        last = next((at for at in rounds() if first is not None and at > first + WINDOW_SECONDS), None)
        return None if first is None or last is None else (first, last)

    with (
        Network(parse_links(link, WORKERS)) as network,
        Workers(command, WORKERS, network=network, environment={"OMP_NUM_THREADS": "1"}, on_line=read) as workers,
    ):
        begun = time.monotonic()
        while (found := window()) is None:
            if not workers.poll(0.1) or time.monotonic() > begun + MOST_SECONDS:
                raise SystemExit(f"{recipe}: the run ended, or took too long")
        for pid in workers.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
    first, last = found
    taken = [sum(1 for at, _ in ends[rank] if first < at <= last) for rank in range(WORKERS)]
    own = sum(1 / length for length in LENGTHS)
    return {
        "what": "speed", "recipe": recipe, "link": link, "seconds": round(last - first, 2), "batches": taken,
        "of_summed_speed": round(sum(taken) / (last - first) / own, 4),
    }  # fmt: skip


def worker(recipe: str) -> None:
    """Train until it is killed; prints when each step has ended."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    task = tasks.load("text")
    shard = task.shards(WORKERS, split="iid", seed=0)[rank]
    model, optimizer = model_of(0)
    trained = thinwire.attach(model, optimizer, recipe)
    number = 0
    while True:
        start = time.monotonic()
        batch = task.batch(shard, number, batch_size=BATCH, seed=0, rank=rank)
        task.loss(model, batch).backward()
        trained.record_batch(BATCH)
        time.sleep(max(0.0, start + LENGTHS[rank] - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        number += 1
        print(json.dumps([time.monotonic(), trained.step]), flush=True)


# -- loss --------------------------------------------------------------------------------------------------------------


def loss_of(strategy: str, seed: int, per_round: int) -> float:
    """The held-out loss after as many batches as the rule says, of so many in a round."""
    steps = BATCHES // per_round * PERIOD

    def train(comm: thinwire.Comm) -> float:
        task = tasks.load("text")
        shard = task.shards(WORKERS, split="iid", seed=0)[comm.rank]
        model, optimizer = model_of(seed)
        trained = thinwire.attach(model, optimizer, strategy, comm=comm)
        number = 0
        while trained.step < steps:
            task.loss(model, task.batch(shard, number, batch_size=BATCH, seed=seed, rank=comm.rank)).backward()
            trained.record_batch(BATCH)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
        with trained.consensus() as agreed:
            return task.evaluate(agreed, limit=256).loss if comm.rank == 0 else 0.0

    return thinwire.run_threads(WORKERS, train, timeout=600)[0]


def losses(base: str, seeds: list[int]) -> list[dict[str, Any]]:
    """A line for each seed."""
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        start = time.monotonic()
        equal = loss_of(base, seed, sum([PERIOD] * WORKERS))
        unequal = loss_of(f"Paced({base}, steps={UNEQUAL_STEPS})", seed, sum(UNEQUAL_STEPS))
        rows.append(
            {
                "what": "loss", "recipe": base, "seed": seed, "equal_fleet": round(equal, 4),
                "unequal_fleet": round(unequal, 4), "difference": round(unequal / equal - 1, 4),
                "seconds": round(time.monotonic() - start),
            }
        )  # fmt: skip
        rows[-1]["mean_difference"] = round(statistics.fmean(row["difference"] for row in rows), 4)
        tell(rows[-1])
    return rows


def tell(row: dict[str, Any]) -> None:
    """Print a result."""
    print(json.dumps(row), flush=True)


def main() -> None:
    """Run what is asked for, or be one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["speed", "loss", "worker"])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--save")
    options = parser.parse_args()
    if options.what == "worker":
        worker(options.recipe[0])
        return
    torch.set_num_threads(1)
    paced = tuple(f"Paced({base})" for base in BASES)
    beside = ("AllReduce()", BASES[0])
    for recipe in options.recipe or (BASES if options.what == "loss" else paced + beside):
        rows = losses(recipe, options.seeds) if options.what == "loss" else [speed(recipe, options.link)]
        if options.what == "speed":
            tell(rows[0])
        if options.save:
            RESULTS.mkdir(parents=True, exist_ok=True)
            with (RESULTS / f"{options.save}.jsonl").open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
