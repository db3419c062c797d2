# SPDX-License-Identifier: Apache-2.0
"""Training steps of recipes and of PyTorch's own methods, in turns in the same worker processes; the 6 M GPT.

python -m benchmarks.turns CONTEST ... [--links 100mbit,none] [--rounds 12] [--workers 4]

- `bare`: attach on one worker, beside the bare loop; `ddp`: AllReduce() beside DistributedDataParallel; `elastic`: the
  same with `elastic=True` too.
- `recipes`: recipes for thin links beside DDP; a turn is one period.
- `compressed`: 1-bit methods beside steps without communication and DDP. The limits are relative to the step without
  communication over 100 Mbit, and to DDP over 1 Gbit. LAMB computes longer than AdamW, so that 1-bit LAMB is compared
  with both. Signs of gradients need SGD.
- `power-sgd`: `AllReduce(PowerSGD(rank))` beside PyTorch's hook for DDP, both compressed from the third step on.
- `overlapped`: coded means that travel while workers go on, beside steps without communication. A turn is one period
  that is not counted, two that are, and then a wait for what is in flight, so that nothing of it travels in another
  recipe's turn: the counted periods begin and end with the same messages under way. The bar is 1.06.

A row has the median of the ratios within rounds, their quartiles and range, seconds a step, and the ratio of rank 0's
processor time. Links need network namespaces. On a machine that does other things meanwhile the times say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire
from benchmarks.paired import Row, Step, Turns, run_in_turns, show, start, take_turns, together
from thinwire.lab import tasks
from thinwire.lab.emulate import available
from thinwire.lab.report.statistics import ratios, spread
from thinwire.worker.worker import internals_of


@dataclass(frozen=True)
class Contest:
    """Who takes turns, and what is compared.

    Args:
        contenders: by name, the optimizer and the recipe; "bare" is the loop without thinwire, "ddp" PyTorch's own.
        ratios: whose seconds are divided by whose, in words, and the bars by link.
        links: over which they run.
        rounds: how often each has its turn.
        steps: of a turn.
        lead: steps before them that are not counted.
        warm_up: steps of each before the first turn.
        workers: how many.
    """

    contenders: Mapping[str, tuple[str, str]]
    ratios: Sequence[Mapping[str, Any]]
    links: Sequence[str] = ("none",)
    rounds: int = 12
    steps: int = 2
    lead: int = 0
    warm_up: int = 2
    workers: int = 4


CONTESTS = {
    name: Contest(**each)
    for name, each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


# -- a worker ----------------------------------------------------------------------------------------------------------


def contender(task: Any, optimizer: str, recipe: str, batch_size: int) -> tuple[Step, Step]:
    """Training steps on one batch of windows, and the wait for what they have left in flight."""
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    shard = task.shards(workers, split="iid", seed=0)[rank]
    batch = task.batch(shard, 0, batch_size=batch_size, seed=0, rank=rank)
    model: nn.Module = task.model("6m", seed=0)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "lamb": thinwire.OneBitLamb,
        "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    }
    moves, wrapped, wait = kinds[optimizer](model.parameters(), lr=1e-3), model, together
    if recipe.startswith("ddp"):
        columns = recipe.removeprefix("ddp").strip()
        # One bucket for PowerSGD: its later messages are sent from the thread that received the earlier ones, so that
        # over Gloo those of several buckets would be matched wrongly.
        wrapped = DistributedDataParallel(model, bucket_cap_mb=64 if columns else None)
        if columns:
            wrapped.register_comm_hook(PowerSGDState(None, int(columns), start_powerSGD_iter=2), powerSGD_hook)
    elif recipe != "bare":
        elastic = recipe.startswith("elastic ")
        worker = thinwire.attach(model, moves, recipe.removeprefix("elastic "), elastic=elastic)
        pending = internals_of(worker).wait_pending

        def wait() -> None:
            pending()
            together()

    # 1-bit LAMB is in its second stage, with overlap.
    freeze = moves.freeze if isinstance(moves, thinwire.OneBitLamb) and wrapped is model else lambda: None

    def once() -> None:
        moves.zero_grad()
        task.loss(wrapped, batch).backward()
        moves.step()
        freeze()

    return once, wait


def work(name: str, rounds: int, batch_size: int) -> None:
    """One worker: run all contenders in alternation; rank 0 writes seconds a step, round by round, as JSON."""
    start()
    contest, task = CONTESTS[name], tasks.load("text")
    made = {each: contender(task, *how, batch_size) for each, how in contest.contenders.items()}
    turns = take_turns(
        {each: once for each, (once, _) in made.items()},
        rounds=rounds,
        steps=contest.steps,
        warm_up=contest.warm_up,
        lead=contest.lead,
        settle={each: wait for each, (_, wait) in made.items()},
    )
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(json.dumps({each: [turn.wall, turn.cpu] for each, turn in turns.items()}) + "\n")
        sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


# -- the table ---------------------------------------------------------------------------------------------------------


def measured(name: str, link: str, *, workers: int = 0, rounds: int = 0, batch_size: int = 4) -> dict[str, Turns]:
    """The turns of a contest's contenders over one link."""
    contest = CONTESTS[name]
    how = "work", name, str(rounds or contest.rounds), str(batch_size)
    found = run_in_turns("turns", workers or contest.workers, *how, link=None if link == "none" else link)
    return {each: Turns(*clocks) for each, clocks in found.items()}


def rows_of(name: str, link: str, turns: Mapping[str, Turns]) -> Iterator[Row]:
    """The ratios over one link, formed within each round."""
    for each in CONTESTS[name].ratios:
        over, under = (turns[each[who]] for who in ("over", "under"))
        found = ratios(over.wall, under.wall)
        low, middle, high = found.quartiles
        seconds = " against ".join(f"{spread(turn.wall).median:.3f} s" for turn in (over, under))
        processor = ratios(over.cpu, under.cpu).median
        cells = f"{low:.3f} to {high:.3f}", f"range {found.low:.3f} to {found.high:.3f}", seconds
        bar = each.get("bars", {}).get(link, "")
        yield f"{each['what']}, {link}", f"{middle:.3f}", f"{'; '.join(cells)}; CPU {processor:.3f}", bar


def rows(name: str, *, links: Sequence[str] = (), workers: int = 0, rounds: int = 0) -> Iterator[Row]:
    """The table of a contest, row by row; over links where they can be emulated."""
    for link in links or CONTESTS[name].links:
        if link == "none" or available() is None:
            yield from rows_of(name, link, measured(name, link, workers=workers, rounds=rounds))


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or run one worker."""
    if arguments[:1] == ["work"]:
        work(arguments[1], int(arguments[2]), int(arguments[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contests", nargs="+", choices=CONTESTS, metavar="CONTEST")
    parser.add_argument("--links", default="", help="separated by commas; none is without one")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    asked = parser.parse_args(arguments)
    if asked.rounds == 1 or asked.rounds < 0:
        parser.error(
            f"--rounds {asked.rounds}: quartiles need at least 2 rounds. Leave it out for those of the contest"
        )
    links = [link for link in asked.links.split(",") if link]
    show(("what", "median", "quartiles; range; seconds; processor time", "bar"), ("---",) * 4)
    for name in asked.contests:
        show(*rows(name, links=links, workers=asked.workers, rounds=asked.rounds))
    if reason := available():
        print(f"\nlinks are not emulated: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
