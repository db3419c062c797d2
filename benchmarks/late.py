# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without late workers: how much of the fleet's summed speed is used, and the loss at equal tokens.

    python -m benchmarks.late speed                     about two minutes
    python -m benchmarks.late loss [--seeds 0 1 2]      about four minutes a seed

The rule, which was written before any run:

- Four workers, of which one is five times slower. `DiLoCo(period=32)`, `LateMerging()` with its defaults.
- `speed`: every worker is a process that trains a vector of 65,536 elements over a shared folder. A step lasts 0.05 s,
  and 0.25 s on the slow worker, which sleeps for most of it, so that workers do not compete for cores. The summed speed
  is 3 / 0.05 + 4 = 64 steps a second. The window begins with worker 0's first closed round after 5 s and ends with the
  first one that ends 40 s later. Printed are the steps of all workers in the window, over its seconds and over 64. The
  bar is 0.93. `DiLoCo(period=32)` over the same folder is printed next to it.
- `loss`: threads of one process, with the GPT of half a million parameters and the data of `benchmarks.unequal`. The
  state machine closes the rounds of this fleet in virtual time, and `replay` trains with these closings. The equal
  fleet is four workers under `DiLoCo(period=32)` alone, and takes 1,664 batches. The unequal one takes as many whole
  rounds as have no more batches in their means. The loss is of the
  consensus on the same 256 held-out windows. Printed is the unequal fleet's loss over the equal one's, less one, for
  each seed, and the mean. The bar is 1 %.

Each result is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import thinwire
from benchmarks.unequal import BATCH, BATCHES, PERIOD, WORKERS, loss_of, model_of
from thinwire.core.storage.bucket import KEY, new_key
from thinwire.elastic.closing import CloseRule, Closing, Contribution
from thinwire.lab import tasks
from thinwire.planning.plan.late import Fleet, simulate

SPEEDS = (1.0, 1.0, 1.0, 5.0)
STEP_SECONDS, WARM_SECONDS, WINDOW_SECONDS, MOST_SECONDS = 0.05, 5.0, 40.0, 150.0
BASE = f"DiLoCo(period={PERIOD})"
NUMEL = 65_536


def worker(rank: int, url: str, *, late: bool) -> None:
    """Train until it is killed; prints when each step has ended."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(NUMEL, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    elastic: Any = thinwire.LateMerging() if late else False
    trained = thinwire.attach(model, optimizer, BASE, rendezvous=url, workers=WORKERS, elastic=elastic, timeout=120)
    x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank)) / NUMEL**0.5
    while True:
        start = time.monotonic()
        model(x).square().mean().backward()
        time.sleep(max(0.0, start + STEP_SECONDS * SPEEDS[rank] - time.monotonic()))
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps([time.monotonic(), trained.step]), flush=True)


def speed(*, late: bool) -> dict[str, Any]:
    """How much of the summed speed is used."""
    ends: list[list[tuple[float, int]]] = [[] for _ in range(WORKERS)]

    def read(rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            at, step = json.loads(line)
            ends[rank].append((at, step))

    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, KEY: new_key(), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.late", "worker", "--url", f"file://{folder}/run"]
        command += ["--late"] * late
        processes: list[subprocess.Popen[str]] = []
        for rank in range(WORKERS):
            each = {**environment, "THINWIRE_RANK": str(rank)}
            processes.append(
                subprocess.Popen([*command, "--rank", str(rank)], env=each, stdout=subprocess.PIPE, text=True)
            )
            threading.Thread(target=read, args=(rank, processes[rank]), daemon=True).start()
        try:
            begun, found = time.monotonic(), None
            while found is None:
                time.sleep(0.2)
                rounds = [at for at, step in list(ends[0]) if step % PERIOD == 0]
                first = next((at for at in rounds if at > ends[0][0][0] + WARM_SECONDS), None)
                last = next((at for at in rounds if first is not None and at > first + WINDOW_SECONDS), None)
                found = None if first is None or last is None else (first, last)
                if time.monotonic() > begun + MOST_SECONDS or any(each.poll() is not None for each in processes):
                    raise SystemExit("the run ended, or took too long")
        finally:
            for process in processes:
                process.kill()
                process.wait()
    first, last = found
    taken = [sum(1 for at, _ in each if first < at <= last) for each in ends]
    summed = sum(1 / (STEP_SECONDS * each) for each in SPEEDS)
    return {
        "what": "speed",
        "recipe": f"LateMerging, {BASE}" if late else BASE,
        "seconds": round(last - first, 2),
        "steps": taken,
        "of_summed_speed": round(sum(taken) / (last - first) / summed, 4),
    }


def closings() -> tuple[Closing, ...]:
    """The closings of this fleet in virtual time, while their batches are not more than the equal fleet's."""
    log: list[Closing] = []
    simulate(Fleet(SPEEDS), CloseRule(), rounds=100, log=log)
    found, batches = list[Closing](), 0
    for closing in log:
        if batches + PERIOD * len(closing.contributions) > BATCHES:
            break
        taken = [Contribution(each.started, each.worker[1:], float(PERIOD * BATCH)) for each in closing.contributions]
        found.append(Closing(closing.round, tuple(taken)))
        batches += PERIOD * len(taken)
    return tuple(found)


def late_loss(seed: int) -> float:
    """The held-out loss of the unequal fleet."""
    log, url = closings(), f"memory://{secrets.token_hex(4)}"

    def train(_: int) -> float | None:
        task = tasks.load("text")
        model, optimizer = model_of(seed)
        late = thinwire.LateMerging(replay=log)
        trained = thinwire.attach(
            model, optimizer, BASE, rendezvous=url, workers=WORKERS, elastic=late, timeout=900, key=""
        )
        rank, number = trained.rank, 0
        shard = task.shards(WORKERS, split="iid", seed=0)[rank]
        while trained.step < len(log) * PERIOD:
            task.loss(model, task.batch(shard, number, batch_size=BATCH, seed=seed, rank=rank)).backward()
            trained.record_batch(BATCH)
            optimizer.step()
            optimizer.zero_grad()
            number += 1
        with trained.consensus() as agreed:
            found = task.evaluate(agreed, limit=256).loss if rank == 0 else None
        trained.detach()
        return found

    with ThreadPoolExecutor(WORKERS) as pool:
        return next(each for each in pool.map(train, range(WORKERS)) if each is not None)


def main() -> None:
    """Run what is asked for, or be one of its workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["speed", "loss", "worker"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--url", default="")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--late", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "worker":
        worker(options.rank, options.url, late=options.late)
    elif options.what == "speed":
        for late in (True, False):
            print(json.dumps(speed(late=late)), flush=True)
    else:
        differences: list[float] = []
        for seed in options.seeds:
            equal, unequal = loss_of(BASE, seed, PERIOD * WORKERS), late_loss(seed)
            differences.append(unequal / equal - 1)
            row = {"what": "loss", "seed": seed, "equal_fleet": round(equal, 4), "unequal_fleet": round(unequal, 4)}
            row |= {"difference": round(differences[-1], 4), "mean_difference": round(statistics.fmean(differences), 4)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
