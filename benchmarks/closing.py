# SPDX-License-Identifier: Apache-2.0
"""Simulate rounds of unequal workers that close by a rule: goodput and ages of late work.

Run `python -m benchmarks.closing FOLDER` for a table, `closing.json` and `closing.svg` over quorum and grace: 256
workers with speeds from a Pareto distribution, one of which fails every 30 seconds, three seeds.

Figures of one cell, means over the seeds:

- goodput: the work in closed rounds and under way, as a fraction of what all workers could do alone;
- mean age: of the contributions of closed rounds, in rounds;
- effective goodput: the work in closed rounds, each times the discount $(1+a)^{-1/2}$ of its age $a$, as the same
  fraction.

The defaults of `CloseRule` follow this rule, which was written before the run that chose them: of all cells whose
effective goodput is at least 0.99 times the largest one, the one with the largest quorum; of these the one with the
longest grace window. Waiting wastes time and lateness wastes weight, and the effective goodput has both. Within one
percent more contributions in a round are better, since means over more workers have less noise.
"""

from __future__ import annotations

import heapq
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from thinwire.elastic.closing import Closer, CloseRule, Closing, Contribution, discount

QUORUMS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
DEVIATIONS = (0.0, 1.0, 3.0, 6.0)
SEEDS = (1, 2, 3)
SIZE, FAILURE_SECONDS, SECONDS = 256, 30.0, 900.0
CLOSE = 0.99
Cell = tuple[float, float]
"""A quorum, and the deviations of a grace window."""


@dataclass(frozen=True)
class Fleet:
    """Workers and how long a round of local steps takes them.

    Attributes:
        speeds: seconds of a round of each worker.
        failure_seconds: the time between two losses; a lost worker is back after two rounds of its own. 0 for none.
        spread: a round takes up to this fraction longer, at random.
        seed: of the random draws.
    """

    speeds: Sequence[float]
    failure_seconds: float = 0.0
    spread: float = 0.02
    seed: int = 0

    @classmethod
    def drawn(cls, size: int, *, seed: int, failure_seconds: float = 0.0) -> Fleet:
        """Draw speeds from a Pareto distribution with exponent 3."""
        draw = random.Random(seed)
        return cls([10.0 * draw.paretovariate(3.0) for _ in range(size)], failure_seconds, seed=seed)


@dataclass(frozen=True)
class Outcome:
    """What a simulated fleet has done.

    Attributes:
        rounds: closed.
        goodput: the work in closed rounds and under way, as a fraction of what all workers could do alone.
        oldest: the largest age of a contribution, in rounds.
        mean_age: over contributions.
        effective: the work in closed rounds, discounted by its age, as the same fraction.
        dropped: contributions that arrived and belong to no round.
    """

    rounds: int
    goodput: float
    oldest: int
    mean_age: float
    effective: float
    dropped: int


def simulate(
    fleet: Fleet,
    rule: CloseRule,
    *,
    rounds: int | None = None,
    until_seconds: float = float("inf"),
    log: list[Closing] | None = None,
) -> Outcome:
    """Run a fleet in virtual time until so many rounds are closed, or so much time has passed.

    Closings are added to `log`.

    A worker that is in time waits for the closing. A late one sends, and continues at once from the newest point.
    """
    draw = random.Random(fleet.seed)
    names = [f"w{i}" for i in range(len(fleet.speeds))]
    seconds = dict(zip(names, fleet.speeds, strict=True))
    # All workers hear the same, so one machine stands for all; `own` is the present owner.
    closer = Closer(rule, "", names, now=0.0)
    events: list[tuple[float, int, str, str, int, float]] = []
    count, began, lives = 0, dict.fromkeys(names, 0.0), dict.fromkeys(names, 0)

    def push(at: float, kind: str, name: str = "", started: int = 0, took: float = 0.0) -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, name, started, took))

    def start(name: str, now: float) -> None:
        took = seconds[name] * (1 + fleet.spread * draw.random())
        began[name] = now
        push(now + took, f"done {lives[name]}", name, closer.round, took)

    for name in names:
        start(name, 0.0)
    if fleet.failure_seconds:
        push(fleet.failure_seconds, "fail")
    now, useful, effective, ages, idle = 0.0, 0.0, 0.0, list[int](), set[str]()
    sent: dict[tuple[str, int], float] = {}
    while now < until_seconds and (rounds is None or closer.round < rounds):
        now, _, kind, name, started, took = heapq.heappop(events)
        if kind == "fail":
            name = draw.choice(sorted(closer.workers))
            if len(closer.workers) > 1:
                closer.lose(name)
                idle.discard(name)
                lives[name] += 1
                push(now + 2 * seconds[name], "back", name)
            push(now + fleet.failure_seconds, "fail")
        elif kind == "back":
            closer.join(name)
            start(name, now)
        elif kind.startswith("done") and kind == f"done {lives[name]}":
            sent[name, started] = took
            closer.arrive(Contribution(started, name, took / seconds[name]), took)
            if started == closer.round:
                idle.add(name)
            else:
                start(name, now)
        wait = closer.seconds_to_wait(now)
        if wait == 0.0:
            closer.own = closer.owner or ""
            closing = closer.propose(now)
            assert closing is not None
            closer.apply(closing, now)
            if log is not None:
                log.append(closing)
            for each in closing.contributions:
                work, age = sent.pop((each.worker, each.started)), closing.round - each.started
                useful, effective = useful + work, effective + work * discount(age, "discounted")
                ages.append(age)
            for name in sorted(idle):
                start(name, now)
            idle.clear()
        elif wait is not None:
            push(now + wait, "grace")
    # Work that has not ended yet will count too.
    useful += sum(now - began[name] for name in closer.workers if name not in idle)
    useful += sum(sent.values())
    dropped = len(sent) - len(closer.waiting)
    most = now * len(names)
    return Outcome(closer.round, useful / most, max(ages), fmean(ages), effective / most, dropped)


def measure() -> dict[Cell, Outcome]:
    """Simulate all cells; figures are means over the seeds, except for the oldest age."""
    found: dict[Cell, Outcome] = {}
    for quorum in QUORUMS:
        for deviations in DEVIATIONS:
            rule = CloseRule(quorum, deviations=deviations)
            each = [
                simulate(Fleet.drawn(SIZE, seed=seed, failure_seconds=FAILURE_SECONDS), rule, until_seconds=SECONDS)
                for seed in SEEDS
            ]
            found[quorum, deviations] = Outcome(
                round(fmean(one.rounds for one in each)),
                fmean(one.goodput for one in each),
                max(one.oldest for one in each),
                fmean(one.mean_age for one in each),
                fmean(one.effective for one in each),
                sum(one.dropped for one in each),
            )
    return found


def choose(found: Mapping[Cell, Outcome]) -> Cell:
    """Return the default by the rule above."""
    best = max(each.effective for each in found.values())
    return max(cell for cell, each in found.items() if each.effective >= CLOSE * best)


def draw(found: Mapping[Cell, Outcome], path: Path) -> None:
    """Draw the three figures over the quorum, a line for each grace window."""
    from thinwire.lab.report.palette import PAPER, looks
    from thinwire.lab.report.picture import canvas, key, legend, plain

    names = [f"deviations={each:g}" for each in DEVIATIONS]
    styles = looks(names)
    figure = canvas(9.0, 3.4)
    panels = {"goodput": "goodput", "mean_age": "mean age, rounds", "effective": "effective goodput"}
    for place, (name, label) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), place + 1)
        plain(axes, x="quorum", y=label)
        for deviations, look in zip(DEVIATIONS, styles, strict=True):
            values = [getattr(found[quorum, deviations], name) for quorum in QUORUMS]
            axes.plot(QUORUMS, values, color=look.tone.light, linestyle=look.line, marker=look.marker, markersize=4)
        axes.set_ylim(bottom=0)
    legend(figure, [key(look) for look in styles], names)
    figure.savefig(path, facecolor=PAPER.light, metadata={"Date": None})


def main() -> None:
    """Print the table and the default; write the figures and the picture."""
    folder, found = Path(sys.argv[1]), measure()
    folder.mkdir(parents=True, exist_ok=True)
    print("quorum  deviations  goodput  effective  mean age  oldest  rounds")
    for (quorum, deviations), each in found.items():
        figures = (
            f"{each.goodput:7.3f}  {each.effective:9.3f}  {each.mean_age:8.2f}  {each.oldest:6d}  {each.rounds:6d}"
        )
        print(f"{quorum:6.2f}  {deviations:10.0f}  {figures}")
    print("the default by the rule: quorum={:g}, deviations={:g}".format(*choose(found)))
    rows = [
        {"quorum": quorum, "deviations": deviations, **asdict(each)} for (quorum, deviations), each in found.items()
    ]
    (folder / "closing.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    draw(found, folder / "closing.svg")


if __name__ == "__main__":
    main()
