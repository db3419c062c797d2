# SPDX-License-Identifier: Apache-2.0
"""Many elastic runs in which workers are killed and join at random moments; each seed is one run.

python -m tests.faults.kills --runs 200 --seed 0            on threads
python -m tests.faults.kills --runs 20 --processes          SIGKILL of real processes
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from typing import Any

import torch

import thinwire
from tests.elastic.fleets import End, Kill, run_fleet, survivors
from tests.elastic.processes import Processes

RECIPES = (
    *("AllReduce()", "AllReduce(codec=ErrorFeedback(OneBit(8)))", "LocalSGD(period=3)", "SlowMo(period=3)"),
    *("DiLoCo(period=3)", "PushSum(staleness=1)", "SlowMo(PushSum(), period=3)", "Gossip()", "CoCoD(period=3)"),
)


def drawn(seed: int) -> dict[str, Any]:
    """The run of a seed: the recipe, the number of workers, who is killed when, and who joins."""
    draw = random.Random(seed)
    size = draw.randint(2, 5)
    victims = draw.sample(range(size), draw.randint(1, size - 1))
    kills = tuple(Kill(victim, draw.randint(0, 9), draw.randint(0, 6), after=draw.random() < 0.5) for victim in victims)
    joins = tuple(draw.randint(1, 9) for _ in range(draw.choice((0, 0, 1, 2))))
    return {"recipe": draw.choice(RECIPES), "size": size, "kills": kills, "joins": joins}


def check(ends: list[End]) -> None:
    """No two views of one number, and one model; raises what is wrong."""
    views: dict[int, tuple[str, ...]] = {}
    for end in ends:
        for epoch, members in end.epochs:
            assert views.setdefault(epoch, members) == members, f"two views {epoch}: {views[epoch]} and {members}"
    alive = survivors(ends)
    for end in alive:
        assert end.agreed is not None and torch.isfinite(end.agreed).all()
        # One that has left its last view behind, since all others ended, agrees with itself.
        assert end.epochs[-1] != alive[0].epochs[-1] or torch.equal(end.agreed, alive[0].agreed)  # type: ignore[arg-type]


def run(seed: int, device: str = "cpu") -> tuple[int, int]:
    """One run on threads; returns how many were killed and how many joined."""
    what = drawn(seed)
    events = {"kills": what["kills"], "joins": what["joins"]}
    ends = run_fleet(what["size"], thinwire.parse(what["recipe"]), steps=16, device=device, **events)
    check(ends)
    killed = len(ends) - len(survivors(ends))
    joined = sum(bool(end.epochs) and end.epochs[0][0] > 0 for end in ends[what["size"] :])
    return killed, joined


def run_processes(seed: int) -> tuple[int, int]:
    """One run on processes."""
    draw = random.Random(seed)
    recipe, size = draw.choice(RECIPES), draw.randint(2, 4)
    victims = draw.sample(range(size), draw.randint(1, size - 1))
    joins = draw.choice((0, 1, 2))
    processes = Processes(recipe, size, steps=60 if joins else 30, seconds=0.02 if joins else 0.005)
    for number, victim in enumerate(victims):
        processes.until(victim, 4 + 6 * number)
        if number < joins:
            processes.start(0)
        time.sleep(draw.random() * 0.2)
        processes.kill(victim)
    reports = processes.finish()
    came = [report for report in reports[size:] if report.views]
    late = [report for report in reports[size:] if not report.views]
    assert all("has ended" in report.error or "left the run" in report.error for report in late), late
    alive = [report for number, report in enumerate(reports[:size]) if number not in victims] + came
    for report in alive:
        assert not report.error, report.error
        assert report.agreed is not None
        # One that is left alone at the end, since all others ended, agrees with itself.
        found = [(each.views, each.agreed[:2] if each.agreed else None) for each in alive]
        assert report.agreed == alive[0].agreed or report.views[-1][1] != alive[0].views[-1][1], found
        check_mass(report.told, report.weights)
    return len(victims), len(came)


def check_mass(told: dict[str, float], weights: list[float]) -> None:
    """Push-sum's weights sum to the number of workers, whoever was killed; what was lost is told."""
    assert math.isfinite(told.get("lost_weight", 0.0))
    for total, number in zip(weights[::2], weights[1::2], strict=True):
        assert abs(total - number) <= 1e-12, (total, number)


def main() -> int:
    """Run the seeds; prints a failing one, and how to run it again."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", action="store_true")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.runs):
        try:
            killed, joined = (run_processes if options.processes else run)(seed)
        except Exception as error:
            counts["failed"] += 1
            what = "" if options.processes else f"{drawn(seed)}: "
            sys.stdout.write(f"seed {seed}: {what}{type(error).__name__}: {str(error)[-1500:]}\n")
            continue
        counts.update(runs=1, killed=killed, joined=joined)
    sys.stdout.write(f"{dict(counts)}\n")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
