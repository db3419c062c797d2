# SPDX-License-Identifier: Apache-2.0
"""Coded means that travel while workers go on: step times against steps without communication, and losses; the 6 M GPT.

python -m benchmarks.overlapped --times [--links 35mbit,100mbit] [--rounds 4]
python -m benchmarks.overlapped --losses FOLDER [--steps 240] [--rounds 3]

Times: all recipes take turns in the same worker processes, so that a machine that slows down slows both sides of a
ratio. A turn is one period that is not counted, two that are, and then a wait for what is in flight, so that nothing
of it travels in another recipe's turn: the counted periods begin and end with the same messages under way. A row's
ratio is the median over rounds, and its spread their range; the ratio of processor time, of rank 0, says what of it is
work and not waiting. The bar is 1.06.

Losses: held-out losses after the same number of steps, relative to the same recipe without a codec and to `LocalSGD` of
the same period; each round has a seed of its own. They do not depend on the link, so that none is emulated. Every run
is kept in the folder, and the command goes on with those that are missing. The bars are 1.01.

On a machine that does other things meanwhile the times say nothing. Times need network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import thinwire
from benchmarks.paired import run_in_turns, start, together
from thinwire.core.statistics import ratios, spread
from thinwire.lab import tasks
from thinwire.lab.emulate import available
from thinwire.lab.runs.comparison import short_name
from thinwire.lab.runs.defaults import resolve
from thinwire.lab.runs.folder import RunFolder
from thinwire.lab.runs.launcher import launch
from thinwire.worker.worker import internals_of

WORKERS, PERIOD = 4, 8
ALONE, LOCAL = "Local()", f"LocalSGD(period={PERIOD})"
OVERLAPPED = (f"OverlapLocalSGD(period={PERIOD}{{}})", f"DiLoCo(period={PERIOD}, delay=6, mixing=0.5{{}})")
CODEC = ", codec=Quantize(4)"
CODED = tuple(recipe.format(CODEC) for recipe in OVERLAPPED)
UNCODED = tuple(recipe.format("") for recipe in OVERLAPPED)


class Contender(NamedTuple):
    """One training step, and the wait for what it has left in flight."""

    step: Callable[[], None]
    wait: Callable[[], None]


def contender(task: Any, recipe: str) -> Contender:
    """Training steps on one batch of 4 windows."""
    rank = int(os.environ["RANK"])
    batch = task.batch(task.shards(WORKERS, split="iid", seed=0)[rank], 0, batch_size=4, seed=0, rank=rank)
    model = task.model("6m", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worker = thinwire.attach(model, optimizer, recipe)

    def once() -> None:
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()

    return Contender(once, internals_of(worker).wait_pending)


def work(rounds: int) -> None:
    """One worker: run all contenders in alternation; rank 0 writes seconds a step, round by round, as JSON."""
    start()
    task = tasks.load("text")
    contenders = {recipe: contender(task, recipe) for recipe in (ALONE, *CODED)}
    seconds: dict[str, list[tuple[float, float]]] = {recipe: [] for recipe in contenders}
    for one in contenders.values():
        one_turn(one, periods=0)
    for turn in range(rounds):
        names = list(contenders) if turn % 2 == 0 else list(reversed(contenders))
        for name in names:
            seconds[name].append(found := one_turn(contenders[name]))
            if dist.get_rank() == 0:
                print(f"round {turn + 1}, {name}: {found[0]:.3f} s a step", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(seconds) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def one_turn(one: Contender, *, periods: int = 2) -> tuple[float, float]:
    """Seconds a step, of the clock and of the processor, of some periods in the midst of others."""
    for _ in range(PERIOD):
        one.step()
    together()
    wall, cpu, steps = time.perf_counter(), time.process_time(), periods * PERIOD
    for _ in range(steps):
        one.step()
    cpu = time.process_time() - cpu
    together()
    wall = time.perf_counter() - wall
    one.wait()
    together()
    return wall / max(steps, 1), cpu / max(steps, 1)


def times(link: str, rounds: int) -> Iterator[str]:
    """A line for each recipe over one link."""
    seconds = run_in_turns("overlapped", WORKERS, "--work", str(rounds), link=link)
    for recipe in CODED:
        clocks = list(zip(*(zip(*seconds[name], strict=True) for name in (recipe, ALONE)), strict=True))
        wall, cpu = (ratios(*clock).words(".3f") for clock in clocks)
        medians = (f"{spread(each).median:.3f} s" for each in clocks[0])
        yield f"| {link} | `{recipe}` | {wall} | {cpu} | {' against '.join(medians)} |"


def losses(folder: Path, steps: int, rounds: int) -> Iterator[str]:
    """A line for each recipe, from runs that are made unless they are in the folder."""
    asked = {"task": "text", "model": "6m", "workers": WORKERS, "steps": steps, "batch_size": 4, "eval_limit": 64}

    def loss(recipe: str, seed: int) -> float:
        # Two recipes may have one short name.
        kind = "coded" if recipe in CODED else "uncoded"
        home = folder / f"{short_name(recipe)}-{kind}-{steps}-{seed}"
        if (summary := RunFolder(home).summary()) is None:
            shutil.rmtree(home, ignore_errors=True)
            summary = launch(resolve({**asked, "strategy": recipe, "seed": seed}), home)
            print(f"{recipe}, seed {seed}: {summary['eval_loss']:.4f}", file=sys.stderr, flush=True)
        return float(summary["eval_loss"])

    recipes = (LOCAL, *UNCODED, *CODED)
    # Round by round, so that an interrupted comparison has whole rounds.
    found = [{recipe: loss(recipe, seed) for recipe in recipes} for seed in range(rounds)]
    for coded, uncoded in zip(CODED, UNCODED, strict=True):
        ends = {recipe: [each[recipe] for each in found] for recipe in (coded, uncoded, LOCAL)}
        over = (ratios(ends[coded], ends[base]).words(".3f") for base in (uncoded, LOCAL))
        yield f"| `{coded}` | {spread(ends[coded]).mean:.4f} | {' | '.join(over)} |"


def main(arguments: Sequence[str]) -> None:
    """Print Markdown tables, or run one worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", action="store_true")
    parser.add_argument("--losses", type=Path, metavar="FOLDER")
    parser.add_argument("--links", default="35mbit,100mbit")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work is not None:
        work(chosen.work)
        return
    if not chosen.times and chosen.losses is None:
        parser.error("give --times, --losses FOLDER, or both")
    if chosen.times:
        if (reason := available()) is not None:
            sys.exit(f"links are not emulated: {reason}")
        print("| link | recipe | step / step alone | processor time | seconds |\n|---|---|---|---|---|", flush=True)
        for link in chosen.links.split(","):
            for line in times(link, chosen.rounds or 4):
                print(line, flush=True)
    if chosen.losses is not None:
        print("| recipe | held-out loss | / uncoded | / LocalSGD |\n|---|---|---|---|", flush=True)
        for line in losses(chosen.losses, chosen.steps, chosen.rounds or 3):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
