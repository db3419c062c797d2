# SPDX-License-Identifier: Apache-2.0
"""Goodput under published schedules of faults, simulated with the closing rule and the patience of elastic runs.

    python -m benchmarks.published.faults [SIZE ...]

writes benchmarks/results/published/faults.json: the storms, and a kill a minute on so many workers (all sizes unless
given), 1,024 in two minutes. The rules were written before the first run, which showed one difference from the
runtime, marked below:

- Simulated are rounds of equal workers: `Closer` closes them, and `Patience` decides how long a round waits for workers
  that stand still, as in a run. A killed worker loses its work since the last round. The others notice after a quarter
  of a second, which is how often waiting workers look. Transfers, copies of the state and the change of members take no
  time. A worker that is back joins at the end of the open round, and at once under "late". (Corrected after the first
  run, which let it join at once everywhere, so that all waited for it. The runtime changes its members between rounds.)
- Contenders: "all-reduce" is a round for each step, which needs all present workers; "elastic" is a round of many steps
  that needs them all, as `DiLoCo(elastic=True)`; "late" is the same with the default `CloseRule()`, as `LateMerging()`.
- Goodput is the work in closed rounds in the window, divided by that of the same contender without faults. "Effective"
  discounts late work by its age.
- Schedules: those of the storms k120, k60 and n32 of ft-diloco, fault by fault (`storms.tsv`, from `configs/chaos` of
  github.com/Neumann-Labs/ft-diloco), with its medians of the time of a round and until a killed worker is back; and
  Poisson kills, one a minute on average, the rate that torchft's authors published, on 32 to 1,024 workers, with
  rounds of 41.5 s and 73 s until a worker is back, as in k120, since torchft's own are not published.
- A step of "all-reduce" is a fiftieth of a round of k120 and k60 and a twentieth of one of n32, their `sync_every`.
- Check: the storms k120 and k60 as torchft ran them, with its median time until the survivor commits after a kill, and
  rounds of a lone replica as long as measured, since both replicas share a GPU. The bar is 5 points from the published
  step efficiency. n32 is predicted without shared hardware, and has no bar.
- Bars: "elastic" and "late" have at least the published step efficiency in k120, k60 and n32, and each of them a
  goodput of 0.90 with a kill a minute on 1,024 workers. Three seeds where faults are drawn.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.published.results import RESULTS
from reproductions.shared.charts import Panel, lines
from thinwire.elastic.closing import Closer, CloseRule, Contribution, Phase, discount
from thinwire.elastic.patience import Patience
from thinwire.lab.report.picture import write_svg

ALL = CloseRule(quorum=1.0, deviations=0.0)
LATE = CloseRule()
_SPREAD = 0.02  # a round takes up to this fraction longer, at random
_NOTICE_SECONDS = 0.25
_TIMEOUT = 120.0  # of the first rounds, before patience is learned
SEEDS = (1, 2, 3)
SIZES = (32, 128, 512, 1024)


@dataclass(frozen=True)
class Fault:
    """One fault: a kill, or a stop, a cut and their ends."""

    at: float
    kind: str
    worker: int


@dataclass(frozen=True)
class Storm:
    """A schedule of faults, and what its source has measured.

    Attributes:
        workers: how many.
        seconds: the window.
        round_seconds: the time of a round without faults.
        steps: of a round.
        back_seconds: from a kill until the worker is back.
        resume_seconds: from a kill until the others commit, as measured with torchft.
        efficiency: published.
        alone: the time of a round of one worker alone, as a fraction of that of all.
    """

    workers: int
    seconds: float
    round_seconds: float
    steps: int
    back_seconds: float
    resume_seconds: float = 0.0
    efficiency: float = 0.0
    alone: float = 1.0


STORMS = {
    "k120": Storm(2, 2700.0, 41.5, 50, 73.0, 14.0, 0.882, alone=30.4 / 41.5),
    "k60": Storm(2, 2700.0, 41.5, 50, 86.0, 12.0, 0.850, alone=30.4 / 41.5),
    "n32": Storm(32, 1800.0, 103.0, 20, 149.0, 57.0, 0.977),
}


def schedule(name: str) -> list[Fault]:
    """The faults of a storm of ft-diloco."""
    lines = (Path(__file__).parent / "storms.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = (line.split("\t") for line in lines)
    return [Fault(float(at), kind, int(worker)) for storm, at, kind, worker in rows if storm == name]


def kills(workers: int, seconds: float, mean_seconds: float, seed: int) -> list[Fault]:
    """Poisson kills of random workers."""
    draw, now, found = random.Random(seed), 0.0, list[Fault]()
    while (now := now + draw.expovariate(1 / mean_seconds)) < seconds:
        found.append(Fault(now, "kill", draw.randrange(workers)))
    return found


def work(
    storm: Storm,
    faults: Sequence[Fault],
    rule: CloseRule,
    *,
    notice_seconds: float = _NOTICE_SECONDS,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the work in closed rounds, in rounds of one worker, and the same discounted by its age."""
    draw, late = random.Random(seed), rule != ALL
    names = [f"{i:04d}" for i in range(storm.workers)]
    closer, patience = Closer(rule, "", names, now=0.0), Patience(_TIMEOUT)
    alive, lives, idle = set(names), dict.fromkeys(names, 0), set[str]()
    frozen: dict[str, list[tuple[int, int]]] = {}  # by worker, what waits for the end of its stop or cut
    frozen_by = dict.fromkeys(names, 0)
    events: list[tuple[float, int, str, str, int, int]] = []
    joining = set[str]()  # at the end of the open round
    opened, useful, effective, numbers = 0.0, 0.0, 0.0, count()
    starts, tokens = dict.fromkeys(names, 0.0), dict.fromkeys(names, 1.0)
    phases = {name: Phase(storm.steps) for name in names}

    def push(at: float, kind: str, name: str = "", life: int = 0, started: int = 0) -> None:
        heapq.heappush(events, (at, next(numbers), kind, name, life, started))

    def start(name: str, now: float, missed: int = 0) -> None:
        share = storm.alone if len(alive) < storm.workers else 1.0
        tokens[name], starts[name] = 1 - missed / storm.steps, now
        took = tokens[name] * storm.round_seconds * share * (1 + _SPREAD * draw.random())
        push(now + took, "done", name, lives[name], closer.round)

    def join(name: str, now: float) -> None:
        if late or not closer.workers & alive - {name}:
            closer.join(name)
            phases[name] = Phase(storm.steps)
            interval = next((each.interval for each in phases.values() if each.interval), None)
            start(name, now, phases[name].join(elapsed=now - opened, interval=interval) if late else 0)
        else:
            closer.lose(name)
            joining.add(name)

    for name in names:
        start(name, 0.0)
    for fault in faults:
        push(fault.at, fault.kind, names[fault.worker])
    now = 0.0
    while events:
        now, _, kind, name, life, started = heapq.heappop(events)
        if now > storm.seconds:
            break
        if kind == "kill" and name in alive and len(alive) > 1:
            alive.discard(name)
            idle.discard(name)
            joining.discard(name)
            lives[name] += 1
            push(now + notice_seconds, "lose", name, lives[name])
            push(now + max(storm.back_seconds, notice_seconds), "back", name, lives[name])
        elif kind == "lose" and name not in alive:
            closer.lose(name)
        elif kind == "back":
            alive.add(name)
            join(name, now)
        elif kind in ("stop", "partition"):
            frozen_by[name] += 1
            frozen.setdefault(name, [])
            push(max(now, opened + patience.seconds), "patience", started=closer.round)
        elif kind in ("cont", "heal"):
            frozen_by[name] -= 1
            if not frozen_by[name]:
                for each_life, each_started in frozen.pop(name):
                    push(now, "done", name, each_life, each_started)
        elif kind == "done" and life == lives[name]:
            if name in frozen:
                frozen[name].append((life, started))
            elif started != closer.round and not late:
                # A round has closed without it: it gets the state of the others, and its work is lost.
                join(name, now)
            else:
                closer.arrive(Contribution(started, name, tokens[name]), storm.round_seconds * tokens[name], now)
                phases[name].record_step(storm.round_seconds / storm.steps)
                if started == closer.round:
                    idle.add(name)
                else:
                    closed = closer.round - started
                    start(name, now, phases[name].end(seconds=now - starts[name], rounds=closed, in_time=False))
        elif kind == "patience" and started == closer.round and not late and idle:
            for each in closer.missing():
                if each in frozen:
                    closer.lose(each)
        if len(closer.waiting) < rule.quorum * len(closer.workers):
            continue  # too few for a quorum
        wait = closer.seconds_to_wait(now)
        if wait == 0.0:
            closer.own = closer.owner or ""
            closing = closer.propose(now)
            if closing is None:  # all present workers are late; the next arrival closes
                continue
            closer.apply(closing, now)
            patience.record(now - opened)
            opened = now
            useful += sum(each.tokens for each in closing.contributions)
            effective += sum(
                each.tokens * discount(closing.round - each.started, "discounted") for each in closing.contributions
            )
            for each in sorted(joining):
                closer.join(each)
            for each in sorted(idle):
                phases[each].end(seconds=now - starts[each], rounds=1, in_time=True)
            for each in sorted(idle | joining):
                start(each, now)
            idle.clear()
            joining.clear()
            push(now + patience.seconds, "patience", started=closer.round)
        elif wait is not None:
            push(now + wait, "grace")
    return useful, effective


def contenders(storm: Storm) -> dict[str, tuple[Storm, CloseRule]]:
    """The methods, each with its rounds."""
    step = replace(storm, round_seconds=storm.round_seconds / storm.steps)
    return {"all-reduce": (step, ALL), "elastic": (storm, ALL), "late": (storm, LATE)}


@lru_cache
def undisturbed(storm: Storm, rule: CloseRule) -> tuple[float, float]:
    """The work without faults."""
    return work(replace(storm, alone=1.0), [], rule)


def goodput(storm: Storm, faults: Sequence[Fault], rule: CloseRule, **options: Any) -> tuple[float, float]:
    """Work under faults over that without, and the same of discounted work."""
    calm, found = undisturbed(storm, rule), work(storm, faults, rule, **options)
    return found[0] / calm[0], found[1] / calm[1]


def measure_storms() -> dict[str, Any]:
    """Simulate the published storms."""
    storms: dict[str, Any] = {}
    for name, storm in STORMS.items():
        faults, own = schedule(name), replace(storm, alone=1.0)
        row: dict[str, Any] = {"workers": storm.workers, "published": storm.efficiency}
        row["faults"] = sum(each.kind in ("kill", "stop", "partition") for each in faults)
        row["torchft"] = goodput(storm, faults, ALL, notice_seconds=storm.resume_seconds)[0]
        for contender, (each, rule) in contenders(own).items():
            row[contender] = goodput(each, faults, rule)
        storms[name] = row
    return storms


def measure_kills(size: int) -> dict[str, Any]:
    """Simulate a kill a minute."""
    row: dict[str, Any] = {"workers": size}
    for contender, (each, rule) in contenders(replace(STORMS["k120"], alone=1.0, workers=size)).items():
        runs = [goodput(each, kills(size, each.seconds, 60.0, seed), rule, seed=seed) for seed in SEEDS]
        row[contender] = [fmean(run[i] for run in runs) for i in range(2)]
        print(size, contender, row[contender], flush=True)
    return row


def verdicts(found: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Each bar, its schedule, and whether it is met."""
    for name in ("k120", "k60"):
        row = found["storms"][name]
        yield (
            "torchft within 5 points of the published efficiency",
            name,
            abs(row["torchft"] - row["published"]) <= 0.05,
        )
    for contender in ("elastic", "late"):
        for name, row in found["storms"].items():
            yield f"{contender} at least the published efficiency", name, row[contender][0] >= row["published"]
        for row in found["kill_a_minute"]:
            if row["workers"] == SIZES[-1]:
                yield f"{contender} at least 0.90", "a kill a minute on 1,024 workers", row[contender][0] >= 0.9


def _committed() -> dict[str, Any]:
    return json.loads((RESULTS / "faults.json").read_text(encoding="utf-8"))


def table() -> Iterator[str]:
    """One line per schedule."""
    found = _committed()
    yield "| Schedule | Workers | Faults | Published | torchft | All-reduce | Elastic | Late |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in found["storms"].items():
        figures = " | ".join(f"{row[each][0]:.1%}" for each in ("all-reduce", "elastic", "late"))
        published = f"{row['published']:.1%} | {row['torchft']:.1%}"
        yield f"| ft-diloco, {name} | {row['workers']} | {row['faults']} | {published} | {figures} |"
    for row in found["kill_a_minute"]:
        figures = " | ".join(f"{row[each][0]:.1%}" for each in ("all-reduce", "elastic", "late"))
        yield f"| a kill a minute | {row['workers']:,} | 45 | | | {figures} |"


def bars() -> Iterator[str]:
    """One line per bar, with the schedules under which it is met or failed."""
    outcomes: dict[str, tuple[list[str], list[str]]] = {}
    for bar, schedule, met in verdicts(_committed()):
        outcomes.setdefault(bar, ([], []))[not met].append(schedule)
    yield "| Bar | Met | Failed |"
    yield "|---|---|---|"
    yield from (f"| {bar} | {', '.join(met)} | {', '.join(failed)} |" for bar, (met, failed) in outcomes.items())


def draw(path: Path) -> None:
    """Draw the goodput with a kill a minute against the number of workers."""
    rows = _committed()["kill_a_minute"]
    goodputs = {name: [{row["workers"]: row[name][0] for row in rows}] for name in ("all-reduce", "elastic", "late")}
    panel = Panel("goodput, a kill a minute", goodputs, "workers", log="x", ticks=SIZES, levels=(0.9,))
    write_svg(lines("goodput", [panel], title="Goodput at scale", caption="").figure, path)


def main() -> None:
    """Simulate, print the verdicts, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sizes", nargs="*", type=int, metavar="SIZE", help="numbers of workers")
    sizes = parser.parse_args().sizes or list(SIZES)
    path = RESULTS / "faults.json"
    before = json.loads(path.read_text(encoding="utf-8"))["kill_a_minute"] if path.exists() else []
    rows = [each for each in before if each["workers"] not in sizes] + [measure_kills(size) for size in sizes]
    found = {"storms": measure_storms(), "kill_a_minute": sorted(rows, key=lambda each: each["workers"])}
    print(json.dumps(found["storms"], indent=1))
    for bar, name, met in verdicts(found):
        print("met   " if met else "failed", f"{bar}: {name}")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
