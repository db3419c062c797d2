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
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch

import thinwire
from benchmarks import fleet
from thinwire.lab.emulate import Network, Workers, parse_links

BASES = ("LocalSGD(period=32)", "SlowMo(period=32)", "DiLoCo(period=32)")
WORKERS, SIZE, BATCH, PERIOD = 4, "0.5m", 4, 32
LENGTHS = (0.25, 0.25, 0.25, 1.0)
UNEQUAL_STEPS = (32, 32, 32, 8)
BATCHES = 1664
WARM_SECONDS, WINDOW_SECONDS, MOST_SECONDS = 20.0, 60.0, 200.0


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(recipe: str, link: str) -> dict[str, Any]:
    """How much of the summed speed a recipe uses."""
    period = 1 if recipe.startswith("AllReduce") else PERIOD
    steps = fleet.Steps(LENGTHS, period, WARM_SECONDS, WINDOW_SECONDS)
    command = [sys.executable, "-m", "benchmarks.unequal", "worker", "--recipe", recipe]
    with (
        Network(parse_links(link, WORKERS)) as network,
        Workers(command, WORKERS, network=network, environment={"OMP_NUM_THREADS": "1"}, on_line=steps.read) as workers,
    ):
        begun = time.monotonic()
        while steps.seen() is None:
            if not workers.poll(0.1) or time.monotonic() > begun + MOST_SECONDS:
                raise SystemExit(f"{recipe}: the run ended, or took too long")
        fleet.kill(workers.pids)
    return {"what": "speed", "recipe": recipe, "link": link, **steps.used("batches")}


def worker(recipe: str) -> None:
    """Train until it is killed; prints when each step has ended."""
    rank = int(os.environ["RANK"])
    trainer = fleet.Trainer(WORKERS, rank, seconds=LENGTHS[rank])
    trained = thinwire.attach(trainer.model, trainer.optimizer, recipe)
    for number in count():
        trainer.step(number, trained)
        fleet.tell(step=trained.step)


# -- loss --------------------------------------------------------------------------------------------------------------


def loss_after(
    steps: int, seed: int, attach: Callable[..., thinwire.Worker], *, size: str = SIZE, batch: int = BATCH
) -> float:
    """The held-out loss after so many steps, as one worker measures it; 0 on ranks other than the first.

    Args:
        steps: of the group's clock.
        seed: of the parameters and the order of the data.
        attach: makes the worker of a model and its optimizer.
        size: of the model.
        batch: sequences of a step.
    """
    trainer = fleet.Trainer(WORKERS, seed=seed, size=size, batch=batch)
    trained = attach(trainer.model, trainer.optimizer)
    trainer.slot = trained.rank
    for number in count():
        if trained.step >= steps:
            break
        trainer.step(number, trained)
    with trained.consensus() as agreed:
        found = trainer.task.evaluate(agreed, limit=256).loss if trained.rank == 0 else 0.0
    trained.detach()
    return found


def loss_of(strategy: str, seed: int, per_round: int, *, size: str = SIZE, batch: int = BATCH) -> float:
    """The held-out loss after as many batches as the rule says, of so many in a round."""
    steps = BATCHES // per_round * PERIOD

    def train(comm: thinwire.Comm) -> float:
        def attach(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> thinwire.Worker:
            return thinwire.attach(model, optimizer, strategy, comm=comm)

        return loss_after(steps, seed, attach, size=size, batch=batch)

    return thinwire.run_threads(WORKERS, train, timeout=600)[0]


def compared(seeds: Sequence[int], fleets: Callable[[int], tuple[float, float]]) -> Iterator[dict[str, Any]]:
    """A line for each seed: the losses of the equal and of the unequal fleet, and how far apart they are."""
    differences: list[float] = []
    for seed in seeds:
        start = time.monotonic()
        equal, unequal = fleets(seed)
        differences.append(unequal / equal - 1)
        row = {"what": "loss", "seed": seed, "equal_fleet": round(equal, 4), "unequal_fleet": round(unequal, 4)}
        row |= {"difference": round(differences[-1], 4), "mean_difference": round(statistics.fmean(differences), 4)}
        yield {**row, "seconds": round(time.monotonic() - start)}


def losses(base: str, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A line for each seed."""

    def fleets(seed: int) -> tuple[float, float]:
        unequal = f"Paced({base}, steps={UNEQUAL_STEPS})"
        return loss_of(base, seed, PERIOD * WORKERS), loss_of(unequal, seed, sum(UNEQUAL_STEPS))

    return ({"recipe": base, **row} for row in compared(seeds, fleets))


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
        fleet.keep(rows, options.save)


if __name__ == "__main__":
    main()
