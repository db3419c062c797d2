"""Backup workers among stragglers: a worker that is always slow, random stalls, and a process that is stopped.

python -m benchmarks.stragglers [--quick]

A step computes next to nothing and sleeps for 50 ms instead, so that four workers fit on any machine. The last worker
is the one that is slow or stopped: while it computes, or in the exchange of a step that it is a member of.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Literal

import torch
import torch.distributed as dist

import laconic
from benchmarks.paired import start
from laconic.arrivals.party import Party
from laconic.arrivals.round import Round
from laconic.emulate import run_workers
from laconic.emulate.straggler import Straggler

WORKERS = 4
STOPPED_SECONDS = 5.0
STOPS_AT_SECONDS = 1.0
AHEAD = 0.9  # so that who is to stop as a member is one
STEPS = 40
Row = tuple[str, str, str, str]


@dataclass(frozen=True)
class Turn:
    """One scenario: how many backups, and what holds whom up.

    Args:
        backups: workers that a step goes without.
        factor: how many times as long the last worker computes.
        probability: how likely a worker's step stalls for 200 ms.
        steps: how many are timed.
        stops: where the last worker's process is stopped for STOPPED_SECONDS; nowhere if it is empty.
        step_seconds: that a step computes.
    """

    backups: int
    factor: float = 1.0
    probability: float = 0.0
    steps: int = STEPS
    stops: Literal["", "computing", "exchange"] = ""
    step_seconds: float = 0.05


STOPPED = {
    f"stopped in its {stops}, {round(1e3 * seconds)} ms steps": Turn(
        1, steps=round(8.0 / seconds), stops=stops, step_seconds=seconds
    )
    for stops, seconds in (("computing", 0.05), ("exchange", 0.034), ("exchange", 0.05), ("exchange", 0.1))
}
TURNS = {
    "even, b=0": Turn(0),
    "even, b=1": Turn(1),
    "slow, b=0": Turn(0, factor=10.0, steps=10),
    "slow, b=1": Turn(1, factor=10.0),
    **{f"stalls, b={b}": Turn(b, probability=0.15) for b in range(WORKERS)},
    **STOPPED,
}


@dataclass
class Taken:
    """Seconds at whose end this rank had ended a step, and whether all ranks held the same in the end."""

    ends: list[float] = field(default_factory=list[float])
    alike: bool = True


def straggler_of(turn: Turn, rank: int, number: int) -> Straggler:
    """What holds a worker up; the same stalls for every number of backups."""
    factor = turn.factor if rank == WORKERS - 1 else 1.0
    return Straggler(factor=factor, stall_probability=turn.probability, stall_seconds=0.2, seed=number, rank=rank)


def take(turn: Turn, number: int) -> Taken:
    """Train for one scenario."""
    rank, taken = dist.get_rank(), Taken()
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    attached = laconic.attach(model, optimizer, laconic.BackupWorkers(backups=turn.backups))
    straggler, batch, turns = straggler_of(turn, rank, number), torch.randn(8, 256) + rank, 0
    pids = gathered(torch.tensor([os.getpid()]))
    dist.barrier()
    begin, usual = time.perf_counter(), Party._work
    if turn.stops and rank == 1:
        stop_for_a_while(int(pids[-1]), stops=turn.stops == "computing")
    ahead = turn.stops == "exchange" and rank == WORKERS - 1
    if ahead:
        stop_in_exchange(begin)
    while attached.step < turn.steps:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        time.sleep(AHEAD * turn.step_seconds if ahead else turn.step_seconds)
        straggler.pause(turns, turn.step_seconds)
        loss.backward()
        optimizer.step()
        turns += 1
        taken.ends.append(time.perf_counter() - begin)
    Party._work = usual
    attached.detach()
    x = gathered(torch.nn.utils.parameters_to_vector(model.parameters()).detach())
    taken.alike = all(torch.equal(x[0], each) for each in x)
    return taken


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's."""
    rows = [torch.empty_like(x) for _ in range(WORKERS)]
    dist.all_gather(rows, x)
    return rows


def stop_for_a_while(pid: int, *, stops: bool) -> None:
    """Continue a process some time from now; and stop it before, if it does not stop itself."""

    def stop() -> None:
        with suppress(ProcessLookupError):
            try:
                if stops:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)

    threading.Timer(STOPS_AT_SECONDS, stop).start()


def stop_in_exchange(begin: float) -> None:
    """Stop this process when it is next a member, before it has sent anything."""
    work, stopped = Party._work, False

    def stopping(self: Party, here: Round, gradient: torch.Tensor) -> None:
        nonlocal stopped
        late = time.perf_counter() - begin - STOPS_AT_SECONDS
        if not stopped and here.adding is not None and 0 < late < STOPPED_SECONDS / 2:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
        work(self, here, gradient)

    Party._work = stopping


def work(rounds: int) -> None:
    """As one of several workers: take all turns in every round, and write what was found as a line of JSON."""
    start()
    found: dict[str, list[tuple[list[float], bool]]] = {name: [] for name in TURNS}
    for number in range(rounds):
        for name, turn in TURNS.items():
            taken = take(turn, number)
            found[name].append((taken.ends, taken.alike))
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Measured:
    """What all ranks wrote: by name, round and rank the ends of steps, and whether ranks were alike."""

    found: list[dict[str, list[tuple[list[float], bool]]]]

    def seconds(self, name: str) -> list[float]:
        """Of a step, by round: a step has ended where the first rank has ended it."""
        rounds = range(len(self.found[0][name]))
        return [min(rank[name][n][0][-1] for rank in self.found) / TURNS[name].steps for n in rounds]

    def alike(self) -> bool:
        """Whether all ranks held the same bits at the end of every turn."""
        return all(alike for rank in self.found for turns in rank.values() for _, alike in turns)

    def longest(self, name: str) -> list[float]:
        """The longest step of those that are not stopped, in median steps beyond the median, by round."""
        excess: list[float] = []
        for number in range(len(self.found[0][name])):
            each: list[float] = []
            for rank in self.found[:-1]:
                ends = rank[name][number][0]
                lasted = [after - before for before, after in pairwise(ends)]
                middle = statistics.median(lasted)
                each.append((max(lasted) - middle) / middle)
            excess.append(max(each))
        return excess

    def caught_up(self, name: str) -> list[float]:
        """Steps that the stopped rank took after it was continued, by round."""
        back = STOPS_AT_SECONDS + STOPPED_SECONDS
        return [float(sum(end > back for end in ends)) for ends, _ in self.found[-1][name]]

    def was_stopped(self, name: str) -> bool:
        """Whether the stopped rank ended no step for most of the time, in every round."""
        return all(max(b - a for a, b in pairwise(ends)) > STOPPED_SECONDS / 2 for ends, _ in self.found[-1][name])


def measured(rounds: int) -> Measured:
    """All scenarios, turn by turn, on processes of this machine."""
    lines: dict[int, str] = {}
    command = [sys.executable, "-m", "benchmarks.stragglers", "work", str(rounds)]

    def keep(rank: int, stream: str, line: str) -> None:
        if stream == "stdout":
            lines[rank] = line

    run_workers(command, WORKERS, on_line=keep, deadline_seconds=900)
    return Measured([json.loads(lines[rank]) for rank in range(WORKERS)])


def row(what: str, each: Sequence[float], bar: str = "", more: str = "") -> Row:
    """A line of the table: median, extremes, and the bar."""
    spread = f"{min(each):.3f} to {max(each):.3f}"
    return (what, f"{statistics.median(each):.3f}", f"{spread}; {more}" if more else spread, bar)


def ratio(found: Measured, over: str, under: str, bar: str = "") -> Row:
    """One scenario's step beside another's, round by round."""
    pairs = list(zip(found.seconds(over), found.seconds(under), strict=True))
    seconds = " against ".join(f"{1e3 * statistics.median(found.seconds(name)):.1f} ms" for name in (over, under))
    return row(f"step, {over} / {under}", [a / b for a, b in pairs], bar, seconds)


def rows(*, quick: bool) -> Iterator[Row]:
    """The whole table, line by line."""
    found = measured(1 if quick else 5)
    yield ratio(found, "even, b=1", "even, b=0")
    yield ratio(found, "slow, b=1", "even, b=0", "1.10")
    yield ratio(found, "slow, b=0", "even, b=0")
    for backups in range(1, WORKERS):
        yield ratio(found, "stalls, b=0", f"stalls, b={backups}", "1.8")
    for name in STOPPED:
        stopped = "" if found.was_stopped(name) else "it was NOT stopped"
        yield row(f"{name}: the others' longest step, beyond the median step", found.longest(name), "1", stopped)
        yield row(f"{name}: steps of the stopped worker after that", found.caught_up(name))
    yield ("replicas bit-identical", "yes" if found.alike() else "NO", "", "yes")


def main(arguments: Sequence[str]) -> None:
    """Print a Markdown table, or be one worker."""
    if arguments[:1] == ["work"]:
        work(int(arguments[1]))
        return
    for line in chain((("what", "median", "extremes", "bar"), ("---",) * 4), rows(quick="--quick" in arguments)):
        print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
