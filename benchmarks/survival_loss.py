# SPDX-License-Identifier: Apache-2.0
"""The held-out loss of a run with kills and joins beside the undisturbed one, at equal tokens.

    python -m benchmarks.survival_loss [--recipe RECIPE ...] [--seeds 0 1 2] [--steps N] [--save NAME]

The rule, which was written before any run:

- Four workers as threads of one process, a GPT of half a million parameters on `text`, 4 sequences a worker and step,
  AdamW. Batches are dealt by `ElasticSampler` from the list of views. A run ends when as many batches have been dealt
  as four workers use in `--steps` steps, whoever took them.
- In the disturbed run a worker is killed, at a step drawn between two kills, before or after one of the calls of that
  step's exchange, and another one is started at once, `KILLS` times. Rank 0 is as likely as any.
- The loss is that of the consensus on the same held-out windows. Told is the disturbed run's loss over the undisturbed
  one's, less one, for each seed and in the mean. The bar is 1 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import thinwire
from benchmarks import fleet
from thinwire.elastic.sampler import ElasticSampler
from thinwire.elastic.threads import ThreadConnector, ThreadNetwork
from thinwire.lab import tasks

RECIPES = ("DiLoCo(period=8)", "LocalSGD(period=8)", "AllReduce()")
WORKERS, KILLS, BATCH = 4, 20, 4


class KilledError(BaseException):
    """Ends a thread as SIGKILL ends a process."""


@dataclass
class Run:
    """What the threads of a run share.

    Attributes:
        recipe: of all.
        seed: of the data, the parameters and the kills.
        batches: the run's length.
        kills: steps at which somebody is killed.
        killed: how many were.
        joined: how many came.
        losses: of those that reached the end.
    """

    recipe: str
    seed: int
    batches: int
    kills: list[int]
    killed: int = 0
    joined: int = 0
    losses: list[float] = field(default_factory=list[float])
    lock: threading.Lock = field(default_factory=threading.Lock)


def dealt(worker: thinwire.Worker) -> int:
    """How many batches all workers have used before this step; the same on all of them."""
    assert worker.elastic is not None
    crews, total = worker.elastic.crews(), 0
    for number, crew in enumerate(crews):
        until = crews[number + 1].begins if number + 1 < len(crews) else worker.step
        total += max(0, min(until, worker.step) - crew.begins) * len(crew.members)
    return total


def trap(worker: thinwire.Worker, connector: ThreadConnector, draw: random.Random) -> None:
    """Let the next call of this worker end its thread, before it is made or after."""
    comm: Any = worker.elastic.comm  # type: ignore[union-attr]
    after, left = draw.random() < 0.5, [draw.randint(0, 1)]

    def strike(made: Any, *arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            return made(*arguments)
        if after:
            made(*arguments).wait()
        connector.end()
        raise KilledError

    for name in ("_all_reduce_", "_all_gather", "_all_to_all", "_send_recv"):
        setattr(comm, name, partial(strike, getattr(comm, name)))


def train(run: Run, network: ThreadNetwork, number: int, pool: ThreadPoolExecutor) -> None:
    """One worker, from its start to the end of the run, or to its own."""
    fleet = network.fleet(f"w{number}", number % WORKERS, WORKERS, timeout=60)
    connector = fleet.connector
    assert isinstance(connector, ThreadConnector)
    task, draw = tasks.load("text"), random.Random(f"{run.seed} {number}")
    shard = task.shards(1, split="iid", seed=0)[0]
    try:
        model = task.model("0.5m", seed=run.seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        worker = thinwire.attach(model, optimizer, run.recipe, elastic=fleet, timeout=60)
        with run.lock:
            run.joined += number >= WORKERS
        sampler = ElasticSampler(task.steps_per_epoch(shard, BATCH), seed=run.seed)
        while dealt(worker) < run.batches:
            with run.lock:
                strikes = bool(run.kills) and worker.step >= run.kills[0] and worker.size == WORKERS
                strikes = strikes and worker.rank == (run.kills[0] + run.seed) % WORKERS
                if strikes:
                    run.kills.pop(0)
                    run.killed += 1
                    pool.submit(train, run, network, WORKERS + run.killed - 1, pool)
            if strikes:
                trap(worker, connector, draw)
            share = sampler.share(worker)
            task.loss(model, task.batch(shard, share, batch_size=BATCH, seed=run.seed, rank=0)).backward()
            optimizer.step()
            optimizer.zero_grad()
        with worker.consensus() as agreed, run.lock:
            if not run.losses:
                run.losses.append(task.evaluate(agreed, limit=256).loss)
    except KilledError:
        pass
    except Exception as error:
        print(f"w{number}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        connector.end()
        fleet.membership.close()


def loss_of(recipe: str, seed: int, steps: int, kills: int) -> Run:
    """One run."""
    draw = random.Random(seed)
    width = steps // (kills + 1) if kills else 0
    at = [width * (i + 1) + draw.randint(-width // 4, width // 4) for i in range(kills)]
    run = Run(recipe, seed, WORKERS * steps, at)
    network = ThreadNetwork()
    with ThreadPoolExecutor(WORKERS + KILLS + 2) as pool:
        for number in range(WORKERS):
            pool.submit(train, run, network, number, pool)
        while not run.losses:
            time.sleep(0.2)
    return run


def compared(recipe: str, seeds: list[int], steps: int) -> Iterator[dict[str, Any]]:
    """A line for each seed."""
    differences: list[float] = []
    for seed in seeds:
        start = time.monotonic()
        whole, disturbed = (loss_of(recipe, seed, steps, kills) for kills in (0, KILLS))
        differences.append(disturbed.losses[0] / whole.losses[0] - 1)
        yield {
            "recipe": recipe, "seed": seed, "steps": steps, "loss": round(whole.losses[0], 4),
            "disturbed_loss": round(disturbed.losses[0], 4), "killed": disturbed.killed,
            "joined": disturbed.joined, "difference": round(differences[-1], 4),
            "mean_difference": round(statistics.fmean(differences), 4),
            "seconds": round(time.monotonic() - start),
        }  # fmt: skip


def main() -> None:
    """Train all runs; prints a line for each seed, and one for each recipe."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", action="append")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for recipe in options.recipe or RECIPES:
        fleet.keep(compared(recipe, options.seeds, options.steps), options.save)


if __name__ == "__main__":
    main()
