# SPDX-License-Identifier: Apache-2.0
"""Simulate rounds of unequal workers that close by a rule: goodput and ages of late work.

Run `python -m benchmarks.closing` for a table over quorum and grace with 256 workers of heavy-tailed speeds, one of
which fails every 30 seconds.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.elastic.closing import Closer, CloseRule, Contribution


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
        dropped: contributions that arrived and belong to no round.
    """

    rounds: int
    goodput: float
    oldest: int
    mean_age: float
    dropped: int


def simulate(fleet: Fleet, rule: CloseRule, *, rounds: int) -> Outcome:
    """Run a fleet in virtual time until so many rounds are closed.

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
    now, useful, ages, idle = 0.0, 0.0, list[int](), set[str]()
    sent: dict[tuple[str, int], float] = {}
    while closer.round < rounds:
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
            useful += sum(sent.pop((each.worker, each.started)) for each in closing.contributions)
            ages += [closing.round - each.started for each in closing.contributions]
            for name in sorted(idle):
                start(name, now)
            idle.clear()
        elif wait is not None:
            push(now + wait, "grace")
    # Work that has not ended yet will count too.
    useful += sum(now - began[name] for name in closer.workers if name not in idle)
    useful += sum(sent.values())
    dropped = len(sent) - len(closer.waiting)
    return Outcome(closer.round, useful / (now * len(names)), max(ages), sum(ages) / len(ages), dropped)


def main() -> None:
    """Print the table."""
    print("quorum  deviations  goodput  mean age  oldest")
    for quorum in (0.25, 0.5, 0.75, 0.9, 1.0):
        for deviations in (0.0, 1.0, 3.0, 6.0):
            found = simulate(
                Fleet.drawn(256, seed=1, failure_seconds=30.0), CloseRule(quorum, deviations=deviations), rounds=60
            )
            row = f"{quorum:6.2f}  {deviations:10.0f}  {found.goodput:7.3f}  {found.mean_age:8.2f}  {found.oldest:6d}"
            print(row)


if __name__ == "__main__":
    main()
