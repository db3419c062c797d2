# SPDX-License-Identifier: Apache-2.0
"""Budgets of bytes over links whose rate changes during the run: what is sent, of what the budget allows.

python -m benchmarks.budget [--workers 2] [--steps 300] [--budget 1MB/s] [--rates 20mbit,200mbit,60mbit] [RECIPE ...]

Workers are processes in network namespaces. Their links begin at the first rate, and take the next one after every
quarter of the steps. Of each worker the bytes that it sent and its own clock are read after every step; a row has the
least and the most, over all workers and all spans of 100 steps, of what was sent over what the budget allowed in that
time. The bars are 0.90 and 1.02. The first spans begin after 20 steps, since nothing has been earned before the first.
A step sleeps for a while, as if it computed: a budget pays for the time up to the step before, so that where steps take
no longer than the machine's hiccups one of these is a part of a span.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import thinwire
from benchmarks.paired import start
from thinwire.lab.emulate import Network, available, parse_links, run_workers

RECIPES = (
    "AllReduce(ErrorFeedback(Nearest()))",
    "AllReduce(Quantize())",
    "AllReduce(PowerSGD())",
    "AllReduce(ErrorFeedback(Gathered(ChunkedTopK())))",
    "LocalSGD(4, codec=ErrorFeedback(Nearest()))",
    "DiLoCo(period=8, fragments=4, delay=2, mixing=0.5, codec=ErrorFeedback(TopK()))",
)
FIRST, SPAN, WIDTH, LAYERS, SECONDS = 20, 100, 256, 8, 0.08
NAMES = ("bits", "rank", "kept", "fraction", "period")


class Found(NamedTuple):
    """Of one recipe.

    Attributes:
        used: of each span of each worker, what was sent over what the budget allowed.
        chosen: of each step, the level by its name; the same on all workers.
        seconds: of the whole run.
    """

    used: list[float]
    chosen: list[dict[str, float]]
    seconds: float


def work(recipe: str, budget: str, steps: int) -> None:
    """One worker: train, and print bytes, clock and levels as JSON; rank 0 says how far it is."""
    start()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    worker = thinwire.attach(model, optimizer, f'Budget({recipe}, "{budget}")')
    draw = torch.Generator().manual_seed(worker.rank)
    rows: list[tuple[float, float, dict[str, float]]] = []
    for step in range(steps):
        optimizer.zero_grad()
        time.sleep(SECONDS)
        model(torch.randn(64, WIDTH, generator=draw)).square().mean().backward()
        optimizer.step()
        chosen = {name: value for name, value in worker.metrics().items() if name in NAMES}
        rows.append((worker.comm.meter.payload_bytes, time.perf_counter(), chosen))
        if worker.rank == 0:
            sys.stdout.write(f"step {step + 1}\n")
            sys.stdout.flush()
    sys.stdout.write(json.dumps(rows) + "\n")
    sys.stdout.flush()
    worker.detach()
    dist.destroy_process_group()


def measured(recipe: str, budget: str, *, workers: int, steps: int, rates: Sequence[str]) -> Found:
    """Run workers, and change their links on the way."""
    found: dict[int, list[tuple[float, float, dict[str, float]]]] = {}
    command = [sys.executable, "-m", "benchmarks.budget", "--work", recipe, budget, str(steps)]
    with Network(parse_links(rates[0], workers)) as network:

        def on_line(rank: int, stream: str, line: str) -> None:
            if stream == "stdout" and line.startswith("step "):
                done = int(line.split()[1])
                if done % max(steps // 4, 1) == 0:
                    rate = rates[done // max(steps // 4, 1) % len(rates)]
                    network.change(parse_links(rate, workers))
            elif stream == "stdout":
                found[rank] = json.loads(line)
            else:
                print(line, file=sys.stderr, flush=True)

        run_workers(command, workers, network=network, on_line=on_line, timeout=600)
    rate = thinwire.Budget(budget=budget).rate
    used = [
        (after[0] - before[0]) / (rate * (after[1] - before[1]))
        for rows in found.values()
        for before, after in zip(rows[FIRST:], rows[FIRST + SPAN :], strict=False)
    ]
    chosen = [[row[2] for row in rows] for rows in found.values()]
    if any(each != chosen[0] for each in chosen):
        raise SystemExit(f"{recipe}: workers have chosen differently")
    return Found(used, chosen[0], found[0][-1][1] - found[0][0][1])


def rows(recipes: Sequence[str], budget: str, *, workers: int, steps: int, rates: Sequence[str]) -> Iterator[str]:
    """A line of the table for each recipe."""
    for recipe in recipes:
        found = measured(recipe, budget, workers=workers, steps=steps, rates=rates)
        name = next(name for name in NAMES if name in found.chosen[-1])
        levels = [each[name] for each in found.chosen if name in each]
        span = f"{min(levels):g} to {max(levels):g}"
        each = 1e3 * found.seconds / (steps - 1)
        yield f"| `{recipe}` | {min(found.used):.3f} | {max(found.used):.3f} | {name} {span} | {each:.0f} ms |"


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or run one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", default="1MB/s")
    parser.add_argument("--rates", default="20mbit,200mbit,60mbit")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work is not None:
        recipe, budget, steps = chosen.work
        work(recipe, budget, int(steps))
        return
    if (reason := available()) is not None:
        sys.exit(f"links are not emulated: {reason}")
    print("| recipe | least used | most used | chosen | a step |\n|---|---|---|---|---|", flush=True)
    rates = chosen.rates.split(",")
    asked = {"workers": chosen.workers, "steps": chosen.steps, "rates": rates}
    for line in rows(chosen.recipes or RECIPES, chosen.budget, **asked):
        print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
