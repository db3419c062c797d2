# SPDX-License-Identifier: Apache-2.0
"""Sketches cost the same however many workers there are, and what they move learns as much as all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from reproductions.dqsgd.pictures import accuracy_picture
from reproductions.dqsgd.thread_runs import Learned, in_words, learned, rate_in_words
from reproductions.shared.claims import Attempt, Claim, Result, at_most, judged, weakest, with_error
from reproductions.shared.threads import Schedule
from reproductions.sketched_sgd.processes import learned_by_processes
from thinwire import AllReduce, FetchSGD, SketchedSGD, Strategy
from thinwire.lab.tasks import Task, load

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

_LOSS, _FLAT = 0.01, 1.1
_MOST_GATHERING = 64  # workers: each gathers what all others chose, and no verdict needs how accurate that is
DENSE, SKETCHED, TOP_K = "dense SGD", "Sketched SGD", "local top-k"
AS_THREADS = "Sketched SGD, as threads"
WIDE, HEAVY, FETCH = "Sketched SGD, 5 rows", "Sketched SGD, momentum 0.9", "FetchSGD"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        task: what is learned.
        batch_size: of all workers together.
        steps: of the runs whose accuracy counts.
        dense_rates: tried for dense SGD with its momentum; the best counts.
        rates: tried for methods without momentum; a tenth of them for those with it.
        seeds: of each run by processes.
        many_seeds: of each run by threads on more workers, whose steps take as many times as long as there are more.
        workers: of the runs whose accuracy counts; the first are processes, all others threads.
        crowd: workers of a few steps whose bytes are compared to those of the second of these numbers.
        fraction: of coordinates moved at each step.
        least: how many times less payload the claim asks for.
    """

    task: str
    batch_size: int
    steps: int
    dense_rates: tuple[float, ...]
    rates: tuple[float, ...]
    seeds: int
    many_seeds: int
    workers: tuple[int, ...]
    crowd: int
    fraction: float
    least: float


@dataclass(frozen=True)
class Method:
    """One way to train: its strategy, the momentum of the workers' own SGD, and the rates that are tried."""

    strategy: Strategy
    momentum: float
    rates: tuple[float, ...]


_DIGITS = Scale("digits", 64, 300, (0.03, 0.1), (0.2, 0.4), 1, 1, (4, 16), 128, 0.01, 4.0)
_MNIST = Scale("mnist", 64, 300, (0.03, 0.06), (0.2, 0.4), 1, 1, (4, 16), 256, 0.004, 20.0)
_MORE: dict[str, Any] = {"rates": (0.1, 0.2, 0.4), "seeds": 3, "many_seeds": 3}


def scales(quick: bool, real: bool) -> list[Scale]:
    """What is measured: handwritten digits, small ones where the files of larger ones are missing."""
    if quick:
        return [_MNIST if real else _DIGITS]
    if not real:
        return [replace(_DIGITS, **_MORE, workers=(4, 16, 64))]
    return [replace(_MNIST, **_MORE, dense_rates=(0.02, 0.05, 0.1), steps=400, batch_size=256, workers=(4, 64, 256))]


def methods(plan: Scale) -> dict[str, Method]:
    """All that are compared on any number of workers."""
    ours = _sketched(plan.fraction)
    return {
        DENSE: Method(AllReduce(), 0.9, plan.dense_rates),
        SKETCHED: Method(ours, 0.0, plan.rates),
        TOP_K: Method(replace(ours, recovery="gather"), 0.0, plan.rates),
    }


def on_many(plan: Scale) -> dict[str, Method]:
    """What is compared on more workers; where time is short, only what the verdict needs."""
    return {name: method for name, method in methods(plan).items() if plan.seeds > 1 or name != TOP_K}


def learned_by(plan: Scale, workers: int) -> dict[str, Method]:
    """What learns on that many workers, a thread each; of the rest only bytes are counted, on the crowd."""
    return {name: method for name, method in on_many(plan).items() if workers <= _MOST_GATHERING or name != TOP_K}


def variants(plan: Scale) -> dict[str, Method]:
    """Sketches nearer to how they were published, on the fewest workers; none where time is short."""
    if plan.seeds == 1:
        return {}
    tenths = tuple(rate / 10 for rate in plan.rates)
    return {
        WIDE: Method(replace(_sketched(plan.fraction), rows=5), 0.0, plan.rates),
        HEAVY: Method(replace(_sketched(plan.fraction), momentum=0.9), 0.0, tenths),
        FETCH: Method(FetchSGD(plan.fraction, columns=4, rows=5), 0.0, tenths),
    }


def _all(plan: Scale) -> dict[str, Method]:
    return {**methods(plan), **variants(plan)}


def _sketched(fraction: float) -> SketchedSGD:
    """One row is enough where a second round looks at the candidates exactly."""
    return SketchedSGD(fraction, columns=4, rows=1, momentum=0.0, dense_below=128, recovery="sketch")


# By number of workers and method: a run for each seed.
Found = Mapping[tuple[int, str], Sequence[Learned]]
Begin = Callable[[str], None]


def measure(attempt: Attempt) -> Result:
    """Learn with every method on few and on many workers, count bytes on a crowd, judge, and draw."""
    plans = scales(attempt.quick, bool(os.environ.get("THINWIRE_DATA")))
    found: dict[str, Found] = {}
    crowds: dict[str, dict[str, Learned]] = {}
    chosen: dict[str, str] = {}
    for plan in plans:
        task = load(plan.task)

        def begin(what: str, named: str = plan.task) -> None:
            attempt.begin(f"{named}, {what}")

        rates = {name: _best_rate(task, method, plan, name, begin) for name, method in _all(plan).items()}
        chosen[f"{plan.task}: rates chosen, by the loss of a seed that is not judged, on {plan.workers[0]} workers"] = (
            ", ".join(f"{name} {rate_in_words(rates[name], each.rates)}" for name, each in _all(plan).items())
        )
        found[plan.task] = {**_by_processes(task, plan, rates, attempt, begin), **_by_threads(task, plan, rates, begin)}
        begin(f"{plan.crowd} workers: bytes")
        briefly = replace(plan, steps=2, batch_size=plan.crowd)
        crowds[plan.task] = {
            name: _run(task, method, 0.01, briefly, plan.crowd, 0) for name, method in on_many(plan).items()
        }
    result = judge(plans, found, crowds)
    return attempt.illustrated(replace(result, details={**result.details, **chosen}), lambda: _pictures(found))


def _by_processes(task: Task, plan: Scale, rates: Mapping[str, float], attempt: Attempt, begin: Begin) -> Found:
    """All methods on the fewest workers, each a process with a link of its own, and ours by threads once more."""
    few, found = plan.workers[0], dict[tuple[int, str], Sequence[Learned]]()
    for name, method in _all(plan).items():
        home = f"{plan.task}-{name.replace(', ', '-').replace(' ', '-')}"
        schedule = _schedule(plan, few, rates[name], method)
        found[few, name] = learned_by_processes(
            attempt, home, task, method.strategy, schedule, workers=few, seeds=plan.seeds
        )
    begin(f"{few} threads: {SKETCHED}")
    ours = methods(plan)[SKETCHED]
    found[few, AS_THREADS] = [_run(task, ours, rates[SKETCHED], plan, few, seed) for seed in range(plan.seeds)]
    return found


def _by_threads(task: Task, plan: Scale, rates: Mapping[str, float], begin: Begin) -> Found:
    """On more workers, a thread each."""
    found = dict[tuple[int, str], Sequence[Learned]]()
    for workers in plan.workers[1:]:
        for name, method in learned_by(plan, workers).items():
            begin(f"{workers} threads: {name}")
            runs = [_run(task, method, rates[name], plan, workers, seed) for seed in range(plan.many_seeds)]
            found[workers, name] = runs
    return found


def _run(task: Task, method: Method, rate: float, plan: Scale, workers: int, seed: int) -> Learned:
    return learned(task, method.strategy, _schedule(plan, workers, rate, method), workers=workers, seed=seed)


def _schedule(plan: Scale, workers: int, rate: float, method: Method) -> Schedule:
    return Schedule(plan.steps, max(1, plan.batch_size // workers), rate, method.momentum)


def _best_rate(task: Task, method: Method, plan: Scale, name: str, begin: Begin) -> float:
    """The rate that learns most with a seed of its own, by threads, on the fewest workers."""
    few = plan.workers[0]
    if len(method.rates) == 1:
        return method.rates[0]
    begin(f"{few} threads: the rate of {name}")
    return min(method.rates, key=lambda rate: _run(task, method, rate, plan, few, 1000).loss)


def judge(plans: Sequence[Scale], found: Mapping[str, Found], crowds: Mapping[str, Mapping[str, Learned]]) -> Result:
    """Whether nothing is lost with a fraction of the bytes, as few of them on many workers as on few."""
    lost, less, asked, growth = list[list[float]](), list[float](), list[float](), list[float]()
    paired: dict[str, str] = {}
    for plan in plans:
        runs = found[plan.task]
        for workers in plan.workers:
            dense, ours = (runs[workers, name] for name in (DENSE, SKETCHED))
            lost.append([one.accuracy - other.accuracy for one, other in zip(dense, ours, strict=True)])
            paired[f"{plan.task}, {workers} workers, {SKETCHED} less {DENSE}"] = with_error([-one for one in lost[-1]])
            less.append(dense[0].payload_bytes / ours[0].payload_bytes)
            asked.append(plan.least)
        some, crowd = _per_step(runs[plan.workers[1], SKETCHED][0]), _per_step(crowds[plan.task][SKETCHED])
        growth.append(crowd / some)
    few = all(ratio >= least for ratio, least in zip(less, asked, strict=True))
    return Result(
        parts={
            "accuracy": weakest([at_most(each, _LOSS) for each in lost]),
            "payload": judged(few),
            "many workers": judged(max(growth) <= _FLAT),
        },
        measured=f"{min(less):.2f} times less payload than dense SGD (all of it counted, both ways) at "
        f"{-max(map(fmean, lost)):+.4f} accuracy at the worst number of workers ({-max(map(max, lost)):+.4f} in the "
        f"worst seed); {_on_wire(plans, found)}{max(growth):.3f} times the bytes on "
        f"{plans[-1].crowd} workers of those on {plans[-1].workers[1]}",
        value=min(less),
        least=min(less),
        most=max(less),
        details={
            **paired,
            **_rows(found),
            **{
                f"{plan.task}, bytes on {plan.crowd} workers, {name}": f"{_per_step(run):,.0f} a worker and step"
                for plan in plans
                for name, run in crowds[plan.task].items()
            },
            "data": "; ".join(
                f"{plan.task}, {plan.steps} steps, {plan.batch_size} examples a step; {plan.workers[0]} workers as "
                f"processes (seeds: {plan.seeds}), {' and '.join(map(str, plan.workers[1:]))} as threads (seeds: "
                f"{plan.many_seeds})"
                for plan in plans
            ),
            "recipes": "; ".join(
                f"{name}: {each.strategy!r}, rates {each.rates}" for name, each in _all(plans[-1]).items()
            ),
        },
    )


def _per_step(run: Learned) -> float:
    return run.payload_bytes / run.steps


def _on_wire(plans: Sequence[Scale], found: Mapping[str, Found]) -> str:
    """The bytes that the interfaces of the processes counted, in words."""
    pairs = [[found[plan.task][plan.workers[0], name][0].wire_bytes for name in (DENSE, SKETCHED)] for plan in plans]
    ratios = [dense / ours for dense, ours in pairs if dense and ours]
    if not ratios:
        return "bytes on the wire not counted (no namespaces here); "
    return f"{min(ratios):.2f} times less on the wire between {plans[0].workers[0]} processes; "


def _rows(found: Mapping[str, Found]) -> dict[str, Any]:
    return {
        f"{task}, {workers} workers, {name}": _row(runs, each[workers, DENSE])
        for task, each in found.items()
        for (workers, name), runs in each.items()
    }


def _row(runs: Sequence[Learned], dense: Sequence[Learned]) -> str:
    wire = runs[0].wire_bytes
    return (
        f"{in_words(runs)}, {_per_step(runs[0]):,.0f} bytes a worker and step, "
        f"{_per_step(dense[0]) / _per_step(runs[0]):.1f} times less than dense"
        + (f"; {wire / runs[0].steps:,.0f} on the wire" if wire else "")
    )


def _pictures(found: Mapping[str, Found]) -> Sequence[Picture]:
    return [
        accuracy_picture(f"{task}-{size}-workers", {name: each for (many, name), each in runs.items() if many == size})
        for task, runs in found.items()
        for size in sorted({workers for workers, _ in runs})
    ]


CLAIM = Claim.read(__file__, measure, globals())
