# SPDX-License-Identifier: Apache-2.0
"""Rounds that close without late workers: their bytes, and how much of the speed of unequal workers they use."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

from thinwire.elastic.closing import Closer, CloseRule, Closing, Contribution, Phase, discount
from thinwire.elastic.late import LateMerging
from thinwire.planning.plan.objects import Objects

_HEADER_BYTES = 256.0  # of a contribution, about
QUORUMS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
DEVIATIONS = (0.0, 1.0, 3.0, 6.0)
_CLOSE = 0.99
_PERIOD = 32  # steps of a simulated round
_ROUNDS = 20  # of the slowest worker, which a recommendation simulates
Cell = tuple[float, float]
"""A quorum, and the deviations of a grace window."""


@dataclass(frozen=True)
class LateCost:
    """The traffic of rounds that close without late workers.

    Attributes:
        sent_bytes_per_round: one contribution of one worker; with fragments, to a round of one of them, on average.
        received_bytes_per_round: those of the others, if all are present.
        closes: when a round closes.
        late: what becomes of late work.
    """

    sent_bytes_per_round: float
    received_bytes_per_round: float
    closes: str
    late: str


def late_cost(late: LateMerging, numels: Sequence[tuple[int, int]], workers: int, *, fragments: int = 1) -> LateCost:
    """Compute the bytes of a round.

    Args:
        late: the options.
        numels: of each vector of parameters, the number of its elements, and the bytes of one.
        workers: number of workers.
        fragments: number of fragments.

    Example:
        >>> from thinwire import LateMerging
        >>> late_cost(LateMerging(), [(1000, 4)], workers=4).sent_bytes_per_round
        4000.0
    """
    codec = late.codec
    # Evenly cut; without a codec the mean over fragments of any sizes is the same.
    cut = [((f + 1) * n // fragments - f * n // fragments, size) for n, size in numels for f in range(fragments)]
    sent = sum(n * max(size, 4) if codec is None or not n else codec.nbytes(n) for n, size in cut) / fragments
    needed = max(1, ceil(late.quorum * workers))
    tokens = f" and {late.tokens:g} tokens" * (late.tokens > 0)
    window = f"the median time of one plus {late.deviations:g} deviations is over, or all usual ones have"
    becomes = {"discounted": "a discount for its age", "full": "no discount"}
    return LateCost(
        sent_bytes_per_round=sent,
        received_bytes_per_round=sent * (workers - 1),
        closes=f"contributions of {needed} of {workers} workers{tokens} have arrived and {window}",
        late=f"counts in a later round by its tokens, with {becomes[late.late]}" if late.late in becomes else "dropped",
    )


def late_objects(cost: LateCost, period: int, workers: int, *, fragments: int = 1) -> list[Objects]:
    """Return the objects of a bucket in each step of a period.

    Each round has a contribution, those of the others, and the closing.
    """
    up, down = cost.sent_bytes_per_round + _HEADER_BYTES, cost.received_bytes_per_round + workers * _HEADER_BYTES
    ends = {(f + 1) * period // fragments for f in range(fragments)}
    end = Objects(puts=1, gets=workers, up=up, down=down, stages=2)
    return [end if step in ends else Objects() for step in range(1, period + 1)]


@dataclass(frozen=True)
class Fleet:
    """Workers and how long a round of local steps takes them.

    Attributes:
        speeds: seconds of a round of each worker.
        failure_seconds: the time between two losses; a lost worker is back after two rounds of its own. 0 for none.
        stop_seconds: the time between two stops of a worker, each up to 1.6 of its rounds long. 0 for none.
        spread: a round takes up to this fraction longer, at random.
        seed: of the random draws.
    """

    speeds: Sequence[float]
    failure_seconds: float = 0.0
    stop_seconds: float = 0.0
    spread: float = 0.02
    seed: int = 0

    @classmethod
    def drawn(cls, size: int, *, seed: int, failure_seconds: float = 0.0) -> Fleet:
        """Draw speeds from a Pareto distribution with exponent 3."""
        draw = random.Random(seed)
        speeds = [10.0 * draw.paretovariate(3.0) for _ in range(size)]
        return cls(speeds, failure_seconds=failure_seconds, seed=seed)


@dataclass(frozen=True)
class Outcome:
    """The record of a simulated fleet.

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
    events: list[tuple[float, int, str, str]] = []
    count, began, lives, opened = 0, dict.fromkeys(names, 0.0), dict.fromkeys(names, 0), 0.0
    phases = {name: Phase(_PERIOD) for name in names}
    starts: dict[str, float] = {}
    # Of each worker's round under way: when it ends, its number, its seconds, and those without stops.
    under_way: dict[str, tuple[float, int, float, float]] = {}

    def push(at: float, kind: str, name: str = "") -> None:
        nonlocal count
        count += 1
        heapq.heappush(events, (at, count, kind, name))

    def start(name: str, now: float, missed: int = 0) -> None:
        took = (1 - missed / _PERIOD) * seconds[name] * (1 + fleet.spread * draw.random())
        began[name] = starts[name] = now
        under_way[name] = now + took, closer.round, took, took
        push(now + took, f"done {lives[name]}", name)

    for name in names:
        start(name, 0.0)
    if fleet.failure_seconds:
        push(fleet.failure_seconds, "fail")
    if fleet.stop_seconds:
        push(fleet.stop_seconds, "stop")
    now, useful, effective, ages, idle = 0.0, 0.0, 0.0, list[int](), set[str]()
    sent: dict[tuple[str, int], float] = {}
    while now < until_seconds and (rounds is None or closer.round < rounds):
        now, _, kind, name = heapq.heappop(events)
        if kind == "fail":
            name = draw.choice(sorted(closer.workers))
            if len(closer.workers) > 1:
                closer.lose(name)
                idle.discard(name)
                lives[name] += 1
                push(now + 2 * seconds[name], "back", name)
            push(now + fleet.failure_seconds, "fail")
        elif kind == "stop":
            name = draw.choice(sorted(closer.workers))
            if name not in idle:
                at, started, took, work = under_way[name]
                stopped = 1.6 * seconds[name] * draw.random()
                lives[name] += 1
                began[name] += stopped
                under_way[name] = at + stopped, started, took + stopped, work
                push(at + stopped, f"done {lives[name]}", name)
            push(now + fleet.stop_seconds, "stop")
        elif kind == "back":
            closer.join(name)
            known = [phase.interval for phase in phases.values() if phase.interval]
            phases[name] = Phase(_PERIOD)
            start(name, now, phases[name].join(elapsed=now - opened, interval=median(known) if known else None))
        elif kind.startswith("done") and kind == f"done {lives[name]}":
            _, started, took, work = under_way[name]
            sent[name, started] = work
            closer.arrive(Contribution(started, name, work / seconds[name]), took, now)
            phases[name].record_step(took / (work / seconds[name] * _PERIOD))
            if started == closer.round:
                idle.add(name)
            else:
                passed = closer.round - started
                start(name, now, phases[name].end(seconds=now - starts[name], rounds=passed, in_time=False))
        wait = closer.seconds_to_wait(now)
        if wait == 0.0:
            closer.own = closer.owner or ""
            closing = closer.propose(now)
            assert closing is not None
            closer.apply(closing, now)
            opened = now
            if log is not None:
                log.append(closing)
            for each in closing.contributions:
                work, age = sent.pop((each.worker, each.started)), closing.round - each.started
                useful, effective = useful + work, effective + work * discount(age, "discounted")
                ages.append(age)
            for name in sorted(idle):
                start(name, now, phases[name].end(seconds=now - starts[name], rounds=1, in_time=True))
            idle.clear()
        elif wait is not None:
            push(now + wait, "grace")
    # Work that has not ended yet will count too.
    useful += sum(now - began[name] for name in closer.workers if name not in idle)
    useful += sum(sent.values())
    dropped = len(sent) - len(closer.waiting)
    most = now * len(names)
    return Outcome(closer.round, useful / most, max(ages), fmean(ages), effective / most, dropped)


def choose(found: Mapping[Cell, Outcome]) -> Cell:
    """Return the cell with the largest quorum, and then the longest grace window, of those with nearly the best result.

    The result is the effective goodput: waiting wastes time, lateness wastes weight, and it has both. Within one
    percent more contributions in a round are better, since means over more workers have less noise.
    """
    best = max(each.effective for each in found.values())
    return max(cell for cell, each in found.items() if each.effective >= _CLOSE * best)


def recommend(slowdowns: Sequence[float]) -> tuple[Cell, Outcome, Outcome]:
    """Recommend a closing rule for workers of these speeds.

    Args:
        slowdowns: how many times as long each worker computes as the fastest.

    Returns:
        The quorum and the deviations, their outcome, and that of rounds that wait for all workers.

    Example:
        >>> cell, late, waiting = recommend([1.0, 1.0, 1.0, 5.0])
        >>> late.goodput > 0.9 > waiting.goodput
        True
    """
    until = _ROUNDS * max(slowdowns)
    found = {
        (quorum, deviations): simulate(Fleet(slowdowns), CloseRule(quorum, deviations=deviations), until_seconds=until)
        for quorum in QUORUMS
        for deviations in DEVIATIONS
    }
    cell = choose(found)
    return cell, found[cell], found[1.0, 0.0]
