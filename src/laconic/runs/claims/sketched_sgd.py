"""Sketches cost the same however many workers there are, and what they move learns as much as all of it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import Any

from laconic.runs.reproductions import Attempt, Claim, Result
from laconic.runs.studies.quantized_threads import Learned, learned
from laconic.runs.studies.threads import Schedule
from laconic.strategies.all_reduce import AllReduce
from laconic.strategies.base import Strategy
from laconic.strategies.fetch import FetchSGD
from laconic.strategies.sketched import SketchedSGD
from laconic.tasks import Task, load

_LOSS, _LESS, _FLAT = 0.01, 4.0, 1.1
DENSE, SKETCHED, TOP_K, FETCH = "dense SGD", "Sketched SGD", "local top-k", "FetchSGD"


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        task: what is learned.
        model: its size; the task's first where None.
        batch_size: of all workers together.
        steps: of the runs whose accuracy counts.
        rates: tried for every method, the best of which counts.
        seeds: of each run that counts.
        workers: of the runs whose accuracy counts.
        crowd: workers of a few steps whose bytes are compared to those of the second of these numbers.
        fraction: of coordinates moved at each step.
        columns: of the table, for each of them.
    """

    task: str
    model: str | None
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    workers: tuple[int, ...]
    crowd: int
    fraction: float
    columns: int


def scales(quick: bool, real: bool) -> list[Scale]:
    """What is measured: digits where time is short or files are missing, pictures otherwise."""
    quickly = Scale("digits", None, 64, 120, (0.03, 0.1), 1, (4, 16), 128, 0.004, 10)
    if quick:
        return [quickly]
    thorough = replace(quickly, steps=400, rates=(0.01, 0.03, 0.1, 0.3), seeds=5, workers=(4, 16, 64))
    mnist = replace(thorough, task="mnist", batch_size=256, workers=(4, 64, 256), crowd=256, seeds=3, fraction=0.002)
    return [thorough, mnist] if real else [thorough]


def methods(plan: Scale) -> dict[str, tuple[Strategy, float]]:
    """All that are compared, with the momentum of the workers' own SGD."""
    part, columns = plan.fraction, plan.columns
    return {
        DENSE: (AllReduce(), 0.9),
        SKETCHED: (SketchedSGD(part, columns, recovery="sketch", dense_below=128), 0.0),
        TOP_K: (SketchedSGD(part, columns, recovery="gather", dense_below=128), 0.0),
        FETCH: (FetchSGD(part, columns), 0.0),
    }


# By number of workers and method: a run for each seed.
Found = Mapping[tuple[int, str], Sequence[Learned]]


def measure(attempt: Attempt) -> Result:
    """Learn with every method on few and on many workers, count bytes on a crowd, judge, and draw."""
    plans, places = scales(attempt.quick, bool(os.environ.get("LACONIC_DATA"))), count()
    found: dict[str, Found] = {}
    crowds: dict[str, dict[str, Learned]] = {}
    for plan in plans:
        task = load(plan.task)
        runs: dict[tuple[int, str], list[Learned]] = {}
        for workers in plan.workers:
            for name, (strategy, momentum) in methods(plan).items():
                attempt.begin(f"{plan.task}, {workers} workers: {name}", next(places))
                runs[workers, name] = _best(task, strategy, momentum, plan, workers)
        found[plan.task] = runs
        attempt.begin(f"{plan.task}, {plan.crowd} workers: bytes", next(places))
        crowds[plan.task] = {
            name: _run(task, methods(plan)[name][0], Schedule(2, 1, 0.01), plan, plan.crowd, 0)
            for name in (DENSE, SKETCHED, TOP_K)
        }
    return judge(plans, found, crowds, _drawn(attempt, found))


def _run(task: Task, strategy: Strategy, schedule: Schedule, plan: Scale, workers: int, seed: int) -> Learned:
    return learned(task, strategy, schedule, workers=workers, seed=seed, model=plan.model)


def _best(task: Task, strategy: Strategy, momentum: float, plan: Scale, workers: int) -> list[Learned]:
    """The runs of the rate that learns most with a seed of its own, on the first number of workers."""

    def run(rate: float, seed: int, size: int) -> Learned:
        schedule = Schedule(plan.steps, max(1, plan.batch_size // size), rate, momentum)
        return _run(task, strategy, schedule, plan, size, seed)

    rate = (
        min(plan.rates, key=lambda each: run(each, 1000, plan.workers[0]).loss)
        if len(plan.rates) > 1
        else next(iter(plan.rates))
    )
    return [run(rate, seed, workers) for seed in range(plan.seeds)]


def judge(
    plans: Sequence[Scale], found: Mapping[str, Found], crowds: Mapping[str, Mapping[str, Learned]], pictures: list[str]
) -> Result:
    """Whether nothing is lost with a fraction of the bytes, as few of them on many workers as on few."""
    lost, less, growth = list[float](), list[float](), list[float]()
    for plan in plans:
        runs = found[plan.task]
        for workers in plan.workers:
            dense, ours = (runs[workers, name] for name in (DENSE, SKETCHED))
            lost.append(fmean(run.accuracy for run in dense) - fmean(run.accuracy for run in ours))
            less.append(dense[0].payload_bytes / ours[0].payload_bytes)
        some, crowd = _per_step(runs[plan.workers[1], SKETCHED][0]), _per_step(crowds[plan.task][SKETCHED])
        growth.append(crowd / some)
    return Result(
        holds=max(lost) <= _LOSS and min(less) >= _LESS and max(growth) <= _FLAT,
        measured=f"{min(less):.2f} times less payload than dense SGD (all of it counted, both ways) at "
        f"{-max(lost):+.4f} accuracy at the worst; {max(growth):.3f} times the bytes on {plans[0].crowd} workers "
        f"of those on {plans[0].workers[1]}",
        value=min(less),
        least=min(less),
        most=max(less),
        details={
            **_rows(found),
            **{
                f"{plan.task}, {plan.crowd} workers, {name}": f"{_per_step(run):,.0f} bytes a worker and step"
                for plan in plans
                for name, run in crowds[plan.task].items()
            },
            "pictures": ", ".join(pictures) or "none: matplotlib is missing",
        },
    )


def _per_step(run: Learned) -> float:
    return run.payload_bytes / run.steps


def _rows(found: Mapping[str, Found]) -> dict[str, Any]:
    return {
        f"{task}, {workers} workers, {name}": f"accuracy {fmean(run.accuracy for run in runs):.4f}, loss "
        f"{fmean(run.loss for run in runs):.4f}, {_per_step(runs[0]):,.0f} bytes a worker and step of "
        f"{4 * runs[0].parameters:,} bytes of parameters"
        for task, each in found.items()
        for (workers, name), runs in each.items()
    }


def _drawn(attempt: Attempt, found: Mapping[str, Found]) -> list[str]:
    """The names of the pictures; none where matplotlib is not installed."""
    try:
        from laconic.runs.studies.quantized_pictures import accuracy_picture
    except ModuleNotFoundError:
        return []
    names: list[str] = []
    for task, runs in found.items():
        for size in sorted({workers for workers, _ in runs}):
            mine = {name: each for (workers, name), each in runs.items() if workers == size}
            names.append(accuracy_picture(f"{task}-{size}-workers", mine).png(attempt.folder).name)
    return names


CLAIM = Claim(
    name="sketched-sgd",
    sentence="Summing sketches of gradients, workers move a few coordinates at a time and learn as much as by dense "
    "SGD, for a fraction of its bytes that does not grow with their number.",
    paper="Ivkin et al., Communication-efficient Distributed SGD with Sketching, NeurIPS 2019, arXiv:1903.04488",
    published="up to 40 times less communication without loss, on up to 256 workers",
    rule=f"at most {_LOSS:.1%} less accurate than dense SGD with at least {_LESS:g} times less payload on any number "
    f"of workers, and at most {_FLAT:g} times the bytes on the largest number as on the second",
    run=measure,
)
