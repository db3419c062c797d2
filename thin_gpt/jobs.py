# SPDX-License-Identifier: Apache-2.0
"""The queue: which run comes next is a function of the results, so it can be stopped and continued at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from thin_gpt.checks import verify
from thin_gpt.racers import RACERS, missing
from thin_gpt.referee import Entry, Record, Run, local_step_seconds, run
from thin_gpt.results import Results, step_seconds
from thin_gpt.task import LINKS, RANKED, SEEDS, SIZES, TUNING_SEED, WORKERS, Text
from thin_gpt.tuning import OUTER_TRIES, TRIES

BEST, EXTENDED = 5, 2
START_SECONDS = 15.0
# Seconds of a step of four workers on two cores without communication, for the estimates alone.
USUAL_STEP = {"toy": 0.02, "400k": 0.03, "6m": 0.26, "30m": 1.2}


@dataclass(frozen=True)
class Job:
    """One run, what it is for, and about how long it takes."""

    kind: str
    run: Run
    seconds: float


def pending(results: Results, size: str, names: Sequence[str], tracks: Sequence[str] = RANKED) -> Iterator[Job]:
    """The runs that can be made now; the first one comes next. More may follow from their results.

    Racer by racer: tuning, the curve without a link, steps on each link with equal workers. Then whole runs of the
    five best of each track, and where the fleet is uneven of all elastic racers.
    """
    ready = True
    for name in names:
        for job in _of_racer(results, size, RACERS[name], tracks):
            ready = False
            yield job
    for track in tracks if ready else ():
        yield from _whole(results, size, track, names)


def _of_racer(results: Results, size: str, entry: Entry, tracks: Sequence[str]) -> list[Job]:
    found, plain = SIZES[size], _plan(entry, size)
    following = results.next_try(entry, size)
    if following is not None:
        kind, rate, outer = following
        decay = found.tuning // 5
        tuned = replace(plain, seed=TUNING_SEED, rate=rate, outer=outer, trunk=found.tuning - decay, decay=decay)
        return [_job(kind, replace(tuned, every=0))]
    plain = _tuned(results, plain)
    for seed in SEEDS if entry.name == "ddp" else SEEDS[:1]:
        if not results.find(kind="curve", racer=entry.name, size=size, seed=seed):
            return [_job("curve", replace(plain, seed=seed))]
    longest = found.trunk * EXTENDED
    reached = results.reached(results.curve(entry.name, size))
    extended = results.find(kind="curve", racer=entry.name, size=size, trunk=longest)
    first = results.curve(entry.name, size)
    if reached is None and not extended and first and "failed" not in first and results.target(size, SEEDS[0]):
        return [_job("curve", replace(plain, trunk=longest, decay=0))]
    return [
        _job("time", timed_run(plain, track))
        for track in tracks
        if track.endswith("/equal") and not results.find(kind="time", racer=entry.name, size=size, track=track)
    ]


def timed_run(plain: Run, track: str) -> Run:
    """A short run whose steps are timed: two periods after half as many steps, at least 12."""
    steps = max(12, 3 * plain.entry.period) + 1
    return replace(plain, track=track, stop=steps, every=0)


def _whole(results: Results, size: str, track: str, names: Sequence[str]) -> list[Job]:
    link, _, fleet = track.partition("/")
    ranking = [name for name in _by_product(results, size, f"{link}/equal")[:BEST] if name in names]
    if fleet != "equal":
        ranking = list(dict.fromkeys([*ranking, *(name for name in names if RACERS[name].elastic)]))
    jobs = list[Job]()
    for seed in SEEDS:
        for name in ranking:
            if not results.find(kind="whole", racer=name, size=size, track=track, seed=seed):
                plain, curve = _tuned(results, _plan(RACERS[name], size)), results.curve(name, size)
                # A racer whose curve needed a longer trunk gets it here too.
                shape = {} if curve is None else {"trunk": curve["trunk"], "decay": curve["decay"]}
                timed = results.one(kind="time", racer=name, size=size, track=f"{link}/equal")
                job = _job("whole", replace(plain, track=track, seed=seed, **shape), timed)
                jobs.append(job)
    return jobs


def _by_product(results: Results, size: str, track: str) -> list[str]:
    timed = {name: results.product(name, size, track) for name in RACERS}
    return sorted((name for name in timed if timed[name] is not None), key=lambda name: timed[name] or 0)


def _plan(entry: Entry, size: str) -> Run:
    found = SIZES[size]
    return Run(entry, size, trunk=found.trunk, decay=found.decay, every=found.every)


def _tuned(results: Results, plain: Run) -> Run:
    chosen = results.rates(plain.entry, plain.size)
    return plain if chosen is None else replace(plain, rate=chosen[0], outer=chosen[1])


def _job(kind: str, plan: Run, timed: Record | None = None) -> Job:
    steps = min(plan.trunk + plan.decay, plan.stop or 1 << 60)
    each = timed["step_seconds"] if timed and "step_seconds" in timed else USUAL_STEP[plan.size]
    link = LINKS.get(plan.track.partition("/")[0])
    if kind == "time" and link and link.rate:
        # At worst whole gradients at every step.
        each += 1.5 * 32 * _parameters(plan.size) / link.rate
    fleet = 3.0 if plan.track.endswith("/uneven") else 1.0
    return Job(kind, plan, START_SECONDS + fleet * each * steps)


def _parameters(size: str) -> float:
    found = SIZES[size]
    return 12.0 * found.layers * found.width**2


def run_job(job: Job, text: Text, local: float) -> Record:
    """Run, verify, and describe a job."""
    plan = replace(job.run, local=local)
    record = run(plan, text) | {"kind": job.kind}
    if job.kind == "time" and "failed" not in record:
        record["step_seconds"] = step_seconds(record["step_ends"], plan.entry.period)
    # A try only chooses a rate.
    tuning = job.kind.startswith("tune")
    record["checks"] = {} if tuning else verify(record, plan.entry, text)
    return record


def work(
    results: Results, size: str, names: Sequence[str], text: Text, *, minutes: float, tracks: Sequence[str] = RANKED
) -> int:
    """Run jobs until none is left, or none ends before the time is over; returns how many are known to be left."""
    until, local = time.monotonic() + 60 * minutes, 0.0
    while job := next(pending(results, size, names, tracks), None):
        if time.monotonic() + job.seconds > until:
            break
        local = local or local_step_seconds(size, text=text)
        record = run_job(job, text, local)
        results.append(record)
        told = record.get("failed", f"final loss {record.get('final')}").splitlines()[0]
        print(f"{job.kind} {record['racer']} {record['track']} rate {record['rate']:g}: {told}", flush=True)
        for name, reason in record["checks"].items():
            print(f"  does not count: {name}: {reason}", flush=True)
    return sum(1 for _ in pending(results, size, names, tracks))


def entered(names: Sequence[str] = ()) -> list[str]:
    """The racers that can run here; prints why others cannot."""
    chosen = list(names) or list(RACERS)
    for name in chosen:
        if name not in RACERS:
            raise ValueError(f"racer {name!r} is unknown. The racers are {', '.join(RACERS)}")
        if library := missing(name):
            print(f"{name}: not run, because {library} is not installed")
    return [name for name in chosen if not missing(name)]


def estimate(results: Results, size: str, names: Sequence[str], tracks: Sequence[str] = RANKED) -> list[str]:
    """Hours that are left, by part, from the usual speed of two cores."""
    found, step = SIZES[size], USUAL_STEP[size]
    whole = START_SECONDS + step * (found.trunk + found.decay)
    tries = 0
    for name in names:
        tries += max(0, TRIES - len(results.tries(name, size)))
        if RACERS[name].outer:
            tries += max(0, OUTER_TRIES - len(results.tries(name, size, outer=True)))
    curves = sum(not results.find(kind="curve", racer=name, size=size) for name in names) + 2 * ("ddp" in names)
    parts = {
        "tuning": tries * (START_SECONDS + step * found.tuning),
        # Half of them are run again with a longer trunk.
        "curves": curves * whole * (1 + EXTENDED * 0.4),
    }
    for track in tracks:
        timed = [name for name in names if not results.find(kind="time", racer=name, size=size, track=track)]
        seconds = sum(_job("time", timed_run(_plan(RACERS[n], size), track)).seconds for n in timed)
        runs = BEST * len(SEEDS) - len(results.find(kind="whole", size=size, track=track))
        slow = 3.0 if track.endswith("/uneven") else 1.2
        parts[track] = (0 if track.endswith("/uneven") else seconds) + max(0, runs) * slow * whole
    lines = [f"{size} {part}: about {seconds / 3600:.1f} hours" for part, seconds in parts.items()]
    return [*lines, f"{size} in all: about {sum(parts.values()) / 3600:.0f} hours on two cores, {WORKERS} workers"]
