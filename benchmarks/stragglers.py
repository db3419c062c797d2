# SPDX-License-Identifier: Apache-2.0
"""Backup workers among stragglers: a worker that is always slow, and random stalls.

python -m benchmarks.stragglers [--rounds N] [--only WORD ...]

A step computes next to nothing and sleeps for 50 ms instead, so that four workers fit on any machine. The last worker
is the one that is slow.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import thinwire
from benchmarks.paired import Row, run_ranks, show, start
from thinwire.lab.emulate import Straggler
from thinwire.lab.report.statistics import ratios, spread

WORKERS = 4
STEPS = 40
STALL = 0.15


@dataclass(frozen=True)
class Scenario:
    """How many backups, and what delays which worker.

    Args:
        backups: workers that a step goes without.
        factor: how many times as long the last worker computes.
        probability: of each step of each worker to stall for 200 ms.
        steps: that are timed.
        step_seconds: of computation in a step.
        numel: parameters, about.
    """

    backups: int
    factor: float = 1.0
    probability: float = 0.0
    steps: int = STEPS
    step_seconds: float = 0.05
    numel: int = 1 << 16


def stalling(step_seconds: float, max_backups: int, steps: int) -> Iterator[tuple[str, Scenario]]:
    """Each step of each worker stalls with the same probability."""
    for backups in range(max_backups + 1):
        name = f"stalls, {1e3 * step_seconds:.0f} ms steps, b={backups}"
        yield name, Scenario(backups, probability=STALL, steps=steps, step_seconds=step_seconds)


SCENARIOS = {
    "even, b=0": Scenario(0),
    "even, b=1": Scenario(1),
    "large, b=0": Scenario(0, numel=1 << 22, steps=20),
    "large, b=1": Scenario(1, numel=1 << 22, steps=20),
    "slow, b=0": Scenario(0, factor=10.0, steps=10),
    "slow, b=1": Scenario(1, factor=10.0),
    **dict(stalling(0.05, WORKERS - 1, STEPS)),
    **dict(stalling(0.01, 2, 2 * STEPS)),
}


@dataclass
class Timings:
    """When this rank ended each step, in seconds, and whether all ranks held the same bits at the end."""

    ends: list[float] = field(default_factory=list[float])
    identical: bool = True


def straggler_of(scenario: Scenario, rank: int, number: int) -> Straggler:
    """What delays a worker; the same stalls for every number of backups."""
    factor = scenario.factor if rank == WORKERS - 1 else 1.0
    return Straggler(factor=factor, stall_probability=scenario.probability, stall_seconds=0.2, seed=number, rank=rank)


def run_scenario(scenario: Scenario, number: int) -> Timings:
    """Train for one scenario."""
    rank, timings = dist.get_rank(), Timings()
    torch.manual_seed(0)
    width = round(scenario.numel**0.5)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    worker = thinwire.attach(model, optimizer, thinwire.BackupWorkers(scenario.backups))
    straggler, batch, iteration = straggler_of(scenario, rank, number), torch.randn(8, width) + rank, 0
    dist.barrier()
    begin = time.perf_counter()
    while worker.step < scenario.steps:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        time.sleep(scenario.step_seconds)
        straggler.pause(iteration, scenario.step_seconds)
        loss.backward()
        optimizer.step()
        iteration += 1
        timings.ends.append(time.perf_counter() - begin)
    worker.detach()
    x = gathered(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    timings.identical = all(torch.equal(x[0], each) for each in x)
    return timings


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's."""
    rows = [torch.empty_like(x) for _ in range(WORKERS)]
    dist.all_gather(rows, x)
    return rows


def work(rounds: int, only: Sequence[str]) -> None:
    """As one of several workers: run all scenarios in every round, and write the timings as a line of JSON."""
    start()
    found: dict[str, list[tuple[list[float], bool]]] = {name: [] for name in chosen(only)}
    for number in range(rounds):
        for name, runs in found.items():
            timings = run_scenario(SCENARIOS[name], number)
            runs.append((timings.ends, timings.identical))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


def chosen(only: Sequence[str]) -> list[str]:
    """The names of the scenarios that begin with one of these words."""
    return [name for name in SCENARIOS if name.startswith(tuple(only))]


@dataclass(frozen=True)
class Measured:
    """What all ranks wrote: by rank, scenario and round, when steps ended and whether all ranks held the same bits."""

    found: list[dict[str, list[tuple[list[float], bool]]]]

    @property
    def names(self) -> list[str]:
        """The scenarios that were run."""
        return list(self.found[0])

    def seconds(self, name: str) -> list[float]:
        """Seconds of a step, by round; a step ends when the first rank ends it."""
        rounds = range(len(self.found[0][name]))
        return [min(rank[name][n][0][-1] for rank in self.found) / SCENARIOS[name].steps for n in rounds]

    def identical(self) -> bool:
        """Whether all ranks held the same bits at the end of every run."""
        return all(identical for rank in self.found for runs in rank.values() for _, identical in runs)


def measured(rounds: int, only: Sequence[str]) -> Measured:
    """All scenarios, one after another, on processes of this machine."""
    return Measured(run_ranks("stragglers", WORKERS, "work", str(rounds), *only))


def row(what: str, each: Sequence[float], bar: str = "", more: str = "") -> Row:
    """A line of the table: median, extremes, and the bar."""
    found = spread(each)
    extremes = f"{found.low:.3f} to {found.high:.3f}"
    return (what, f"{found.median:.3f}", f"{extremes}; {more}" if more else extremes, bar)


def ratio(found: Measured, over: str, under: str, bar: str = "") -> Row:
    """One scenario's step beside another's, round by round."""
    each = ratios(found.seconds(over), found.seconds(under)).values
    seconds = " against ".join(f"{1e3 * spread(found.seconds(name)).median:.1f} ms" for name in (over, under))
    return row(f"step, {over} / {under}", each, bar, seconds)


def rows(*, quick: bool) -> Iterator[Row]:
    """Measure the scenarios that have bars."""
    return table(measured(1 if quick else 5, ("even, b=0", "slow", "stalls, 50 ms steps")))


def table(found: Measured) -> Iterator[Row]:
    """The whole table, line by line."""
    for name in found.names:
        kind, _, rest = name.partition(",")
        if kind in ("even", "large") and "b=1" in rest:
            yield ratio(found, name, f"{kind}, b=0")
        elif kind == "slow" and "even, b=0" in found.names:
            yield ratio(found, name, "even, b=0", "1.10" if "b=1" in rest else "")
        elif kind == "stalls" and "b=0" not in rest:
            yield ratio(found, f"{name.partition(', b=')[0]}, b=0", name, "1.8")
    yield ("replicas bit-identical", "yes" if found.identical() else "NO", "", "yes")


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or be one worker."""
    if arguments[:1] == ["work"]:
        work(int(arguments[1]), arguments[2:])
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stragglers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often every scenario is run")
    parser.add_argument("--only", nargs="+", default=[""], help='scenarios that begin so, such as even "slow, b=1"')
    given = parser.parse_args(arguments)
    found = measured(given.rounds, given.only)
    show(("what", "median", "extremes", "bar"), ("---",) * 4, *table(found))


if __name__ == "__main__":
    main(sys.argv[1:])
