# SPDX-License-Identifier: Apache-2.0
"""Contenders take turns, block by block, in the same worker processes; ratios are formed within each round.

A machine that slows down for a minute slows both sides of a ratio, which is why seconds of separate runs are never
compared here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.emulate import Network, parse_links, run_workers
from thinwire.lab.report.statistics import ratios, spread

Step = Callable[[], None]
Row = tuple[str, ...]


@dataclass
class Turns:
    """One contender's seconds per step, of the clock and of this process's CPU, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def take_turns(
    contenders: Mapping[str, Step],
    *,
    rounds: int,
    steps: int,
    warm_up: int = 3,
    lead: int = 0,
    settle: Mapping[str, Step] | None = None,
) -> dict[str, Turns]:
    """Let each contender do `steps` steps per round; the order alternates from round to round.

    Args:
        contenders: their steps.
        rounds: turns of each.
        steps: of a turn that count.
        warm_up: steps of each before the first round.
        lead: steps before those that count.
        settle: what ends a contender's turn and is not counted.
    """
    turns, ends = {name: Turns() for name in contenders}, settle or {}
    for name, step in contenders.items():
        for _ in range(warm_up):
            step()
        ends.get(name, _nothing)()
    for turn in range(rounds):
        names = list(contenders)[:: -1 if turn % 2 else 1]
        for name in names:
            for _ in range(lead):
                contenders[name]()
            together()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name]()
            turns[name].cpu.append((time.process_time() - cpu) / steps)
            together()
            turns[name].wall.append((time.perf_counter() - wall) / steps)
            ends.get(name, _nothing)()
    return turns


def _nothing() -> None: ...


def run_ranks(
    module: str, workers: int, *arguments: str, link: str | None = None, timeout: float = 1800.0
) -> list[Any]:
    """Run workers of a benchmark of this package, and return what each has written as JSON."""
    lines: list[list[str]] = [[] for _ in range(workers)]
    errors: list[str] = []

    def keep(rank: int, stream: str, line: str) -> None:
        (lines[rank] if stream == "stdout" else errors).append(line)

    command, one = [sys.executable, "-m", f"benchmarks.{module}", *arguments], {"OMP_NUM_THREADS": "1"}
    with ExitStack() as contexts:
        network = None if link is None else contexts.enter_context(Network(parse_links(link, workers)))
        exits = run_workers(command, workers, network=network, environment=one, on_line=keep, timeout=timeout)
    if any(each.code for each in exits):
        raise SystemExit("\n".join([*lines[0], *errors][-30:]))
    return [json.loads("".join(each)) if each else None for each in lines]


def run_in_turns(module: str, workers: int, *arguments: str, link: str | None = None) -> dict[str, Any]:
    """Run a benchmark of this package whose contenders take turns, once, and return what rank 0 has reported."""
    return run_ranks(module, workers, *arguments, link=link, timeout=900.0)[0]


def together() -> None:
    """Wait for all workers, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def summary(turns: Mapping[str, Turns], *, baseline: str) -> dict[str, Any]:
    """Medians, and speeds against the baseline with their quartiles."""
    base = turns[baseline]
    rows = {
        name: {
            "median_seconds_per_step": round(spread(turn.wall).median, 5),
            "median_cpu_seconds_per_step": round(spread(turn.cpu).median, 5),
            f"speed_vs_{baseline}": _quartiles(base.wall, turn.wall),
            f"cpu_speed_vs_{baseline}": _quartiles(base.cpu, turn.cpu),
        }
        for name, turn in turns.items()
    }
    return {"rounds": len(base.wall), "contenders": rows}


def _quartiles(base: list[float], values: list[float]) -> dict[str, float]:
    quartiles = ratios(base, values).quartiles
    return {name: round(each, 4) for name, each in zip(("low", "median", "high"), quartiles, strict=True)}


def show(*rows: Row) -> None:
    """Print lines of a Markdown table."""
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def start() -> None:
    """Join the other workers, where the environment names any, on one thread each."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
