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

from thinwire.core.statistics import ratios, spread
from thinwire.lab.emulate import Network, parse_links, run_workers

Step = Callable[[], None]


@dataclass
class Turns:
    """One contender's seconds per step, of the clock and of this process's CPU, round by round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def take_turns(contenders: Mapping[str, Step], *, rounds: int, steps: int, warm_up: int = 3) -> dict[str, Turns]:
    """Let each contender do `steps` steps per round; the order alternates from round to round."""
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    turns = {name: Turns() for name in contenders}
    for turn in range(rounds):
        names = list(contenders) if turn % 2 == 0 else list(reversed(contenders))
        for name in names:
            together()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                contenders[name]()
            turns[name].cpu.append((time.process_time() - cpu) / steps)
            together()
            turns[name].wall.append((time.perf_counter() - wall) / steps)
    return turns


def run_in_turns(module: str, workers: int, *arguments: str, link: str | None = None) -> dict[str, Any]:
    """Run a benchmark of this package whose contenders take turns, once, and return what rank 0 has reported."""
    lines: list[str] = []
    others: list[str] = []
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]

    def keep(rank: int, stream: str, line: str) -> None:
        (lines if (rank, stream) == (0, "stdout") else others).append(line)

    with ExitStack() as contexts:
        network = None if link is None else contexts.enter_context(Network(parse_links(link, workers)))
        one = {"OMP_NUM_THREADS": "1"}
        exits = run_workers(command, workers, network=network, environment=one, on_line=keep, timeout=900)
    if any(each.code for each in exits):
        raise SystemExit("\n".join([*lines, *others][-30:]))
    found: dict[str, Any] = json.loads("".join(lines))
    return found


def together() -> None:
    """Wait for all workers, where there are several."""
    if dist.is_initialized():
        dist.barrier()


def report(turns: Mapping[str, Turns], *, baseline: str) -> None:
    """Rank 0 writes medians, and speeds against the baseline with their quartiles, as JSON."""
    if int(os.environ.get("RANK", "0")):
        return
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
    sys.stdout.write(json.dumps({"rounds": len(base.wall), "contenders": rows}, indent=1) + "\n")
    sys.stdout.flush()


def _quartiles(base: list[float], values: list[float]) -> dict[str, float]:
    quartiles = ratios(base, values).quartiles
    return {name: round(each, 4) for name, each in zip(("low", "median", "high"), quartiles, strict=True)}


def with_seconds(over: list[float], under: list[float]) -> tuple[str, str]:
    """The median ratio within rounds, and its quartiles with the seconds of both, in words."""
    low, middle, high = ratios(over, under).quartiles
    seconds = " against ".join(f"{spread(each).median:.3f} s" for each in (over, under))
    return f"{middle:.3f}", f"{low:.3f} to {high:.3f}; {seconds}"


def start() -> None:
    """Join the other workers, where the environment names any, on one thread each."""
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
