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

_LOSS, _FLAT = 0.01, 1.1
DENSE, SKETCHED, TOP_K = "dense SGD", "Sketched SGD", "local top-k"
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
        seeds: of each run that counts.
        workers: of the runs whose accuracy counts.
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


_DIGITS = Scale("digits", 64, 300, (0.03, 0.1), (0.2, 0.4), 1, (4, 16), 128, 0.01, 4.0)
_MNIST = Scale("mnist", 64, 300, (0.03, 0.06), (0.2, 0.4), 1, (4, 16), 256, 0.004, 20.0)
_MORE: dict[str, Any] = {"rates": (0.1, 0.2, 0.4), "seeds": 3, "steps": 600}


def scales(quick: bool, real: bool) -> list[Scale]:
    """What is measured: handwritten digits, small ones where the files of larger ones are missing."""
    if quick:
        return [_MNIST if real else _DIGITS]
    digits = replace(_DIGITS, **_MORE, workers=(4, 16, 64))
    mnist = replace(_MNIST, **_MORE, dense_rates=(0.02, 0.05, 0.1), batch_size=256, workers=(4, 64, 256))
    return [digits, mnist] if real else [digits]


def methods(plan: Scale) -> dict[str, Method]:
    """All that are compared on any number of workers."""
    ours = _sketched(plan.fraction)
    return {
        DENSE: Method(AllReduce(), 0.9, plan.dense_rates),
        SKETCHED: Method(ours, 0.0, plan.rates),
        TOP_K: Method(replace(ours, recovery="gather"), 0.0, plan.rates),
    }


def variants(plan: Scale) -> dict[str, Method]:
    """Sketches nearer to how they were published, on the fewest workers; where time is short, at the first rate."""
    rates = plan.rates if plan.seeds > 1 else plan.rates[:1]
    tenths = tuple(rate / 10 for rate in rates)
    return {
        WIDE: Method(replace(_sketched(plan.fraction), rows=5), 0.0, rates),
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


def measure(attempt: Attempt) -> Result:
    """Learn with every method on few and on many workers, count bytes on a crowd, judge, and draw."""
    plans, places = scales(attempt.quick, bool(os.environ.get("LACONIC_DATA"))), count()
    found: dict[str, Found] = {}
    crowds: dict[str, dict[str, Learned]] = {}
    for plan in plans:
        task = load(plan.task)
        runs: dict[tuple[int, str], list[Learned]] = {}
        rates: dict[str, float] = {}
        for workers in plan.workers:
            for name, method in (_all(plan) if workers == plan.workers[0] else methods(plan)).items():
                attempt.begin(f"{plan.task}, {workers} workers: {name}", next(places))
                if name not in rates:
                    rates[name] = _best_rate(task, method, plan)
                runs[workers, name] = [
                    _run(task, method, rates[name], plan, workers, seed) for seed in range(plan.seeds)
                ]
        found[plan.task] = runs
        attempt.begin(f"{plan.task}, {plan.crowd} workers: bytes", next(places))
        briefly = replace(plan, steps=2, batch_size=plan.crowd)
        crowds[plan.task] = {
            name: _run(task, methods(plan)[name], 0.01, briefly, plan.crowd, 0) for name in (DENSE, SKETCHED, TOP_K)
        }
    return judge(plans, found, crowds, _drawn(attempt, found))


def _run(task: Task, method: Method, rate: float, plan: Scale, workers: int, seed: int) -> Learned:
    schedule = Schedule(plan.steps, max(1, plan.batch_size // workers), rate, method.momentum)
    return learned(task, method.strategy, schedule, workers=workers, seed=seed)


def _best_rate(task: Task, method: Method, plan: Scale) -> float:
    """The rate that learns most with a seed of its own, on the fewest workers."""
    few = plan.workers[0]
    if len(method.rates) == 1:
        return method.rates[0]
    return min(method.rates, key=lambda rate: _run(task, method, rate, plan, few, 1000).loss)


def judge(
    plans: Sequence[Scale], found: Mapping[str, Found], crowds: Mapping[str, Mapping[str, Learned]], pictures: list[str]
) -> Result:
    """Whether nothing is lost with a fraction of the bytes, as few of them on many workers as on few."""
    lost, less, asked, growth = list[float](), list[float](), list[float](), list[float]()
    for plan in plans:
        runs = found[plan.task]
        for workers in plan.workers:
            dense, ours = (runs[workers, name] for name in (DENSE, SKETCHED))
            lost.append(fmean(run.accuracy for run in dense) - fmean(run.accuracy for run in ours))
            less.append(dense[0].payload_bytes / ours[0].payload_bytes)
            asked.append(plan.least)
        some, crowd = _per_step(runs[plan.workers[1], SKETCHED][0]), _per_step(crowds[plan.task][SKETCHED])
        growth.append(crowd / some)
    few = all(ratio >= least for ratio, least in zip(less, asked, strict=True))
    return Result(
        holds=max(lost) <= _LOSS and few and max(growth) <= _FLAT,
        measured=f"{min(less):.2f} times less payload than dense SGD (all of it counted, both ways) at "
        f"{-max(lost):+.4f} accuracy at the worst; {max(growth):.3f} times the bytes on {plans[-1].crowd} workers "
        f"of those on {plans[-1].workers[1]}",
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
            "recipes": "; ".join(
                f"{name}: {each.strategy!r}, rates {each.rates}" for name, each in _all(plans[-1]).items()
            ),
            "pictures": ", ".join(pictures) or "none: matplotlib is missing",
        },
    )


def _per_step(run: Learned) -> float:
    return run.payload_bytes / run.steps


def _rows(found: Mapping[str, Found]) -> dict[str, Any]:
    return {
        f"{task}, {workers} workers, {name}": f"accuracy {fmean(run.accuracy for run in runs):.4f}, loss "
        f"{fmean(run.loss for run in runs):.4f}, {_per_step(runs[0]):,.0f} bytes a worker and step, "
        f"{_per_step(each[workers, DENSE][0]) / _per_step(runs[0]):.1f} times less than dense"
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
    rule=f"on any number of workers at most {_LOSS:.1%} less accurate than dense SGD at its best learning rate, with "
    f"at least {_MNIST.least:g} times less payload on MNIST ({_DIGITS.least:g} times on scikit-learn's digits, whose "
    f"model is small), and at most {_FLAT:g} times the bytes on the largest number of workers as on the second",
    run=measure,
)
