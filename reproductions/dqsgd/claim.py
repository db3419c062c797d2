# SPDX-License-Identifier: Apache-2.0
"""Bits chosen by the gradient keep a bound with hardly more than the fewest, and learn more than fixed ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from reproductions.dqsgd.pictures import accuracy_picture, bits_picture
from reproductions.dqsgd.regression import Kept, kept, parity
from reproductions.dqsgd.thread_runs import Learned, in_words, learned, mean_of, rate_in_words
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least, at_most, judged, weakest, with_error
from reproductions.shared.threads import Schedule
from thinwire import DQSGD, QSGD, AllReduce, BitBudget, ErrorBound, FixedBits, MajorityVote, Strategy, TernGrad
from thinwire.lab.tasks import Task, load

WORKERS = 4
_BLOCK = 512  # as QSGD's buckets
_EXCESS, _POINTS, _FEWER = 0.01, 0.005, 0.75
# Scales are counted too: 3 bits an entry with them exceed three quarters of QSGD's bytes by a hair, 2.95 do not.
_BITS = 2.95
_DENSE, _OURS, _RIVAL = "SGD", f"DQ-SGD, {_BITS:g} bits", "QSGD, 4 bits"
_SLOW = ("fixed, 4 bits", "DQ-SGD, 4 bits", "DQ-SGD, bound")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        task: what is learned.
        model: its size; the task's first where None.
        schedule: how long; the rate is one of `rates`.
        rates: tried for every method, the best of which counts.
        votes: tried where all entries move alike.
        seeds: of each run that counts.
        bounds: seeds of the runs under a bound.
        left_out: methods that no verdict needs, where time is short.
    """

    task: str
    model: str | None
    schedule: Schedule
    rates: tuple[float, ...]
    votes: tuple[float, ...]
    seeds: int
    bounds: int
    left_out: tuple[str, ...] = _SLOW


_DIGITS = Scale("digits", None, Schedule(100, 8, 0.1, momentum=0.9), (0.03, 0.1), (0.001, 0.003), 3, 1)
_NEWS = Scale("agnews", None, Schedule(200, 16, 1.0, momentum=0.9), (1.0,), (0.01,), 3, 1)


def scales(quick: bool, real: bool) -> list[Scale]:
    """What is measured: the paper's tasks, the first of them where time is short; digits where files are missing."""
    if quick:
        return [_NEWS if real else _DIGITS]
    if not real:
        return [replace(_DIGITS, rates=(0.03, 0.1, 0.3), votes=(0.001, 0.003), seeds=5, bounds=5, left_out=())]
    schedule, rates, votes = Schedule(180, 32, 0.1, momentum=0.9), (0.03, 0.1, 0.3), (0.0003, 0.001, 0.003)
    pictures = Scale("cifar10", "resnet8", schedule, rates, votes, 3, 1)
    news = replace(_NEWS, rates=(0.5, 1.0, 2.0), votes=(0.003, 0.01, 0.03), bounds=5, left_out=())
    return [news, pictures]


def methods(steps: int, left_out: Sequence[str] = ()) -> dict[str, Strategy]:
    """All that are compared, by name, but for those left out."""
    every: dict[str, Strategy] = {
        _DENSE: AllReduce(),
        "SignSGD": AllReduce(MajorityVote()),
        "TernGrad": AllReduce(TernGrad()),
        _RIVAL: AllReduce(QSGD(4)),
        "fixed, 4 bits": DQSGD(FixedBits(4), _BLOCK),
        "fixed, 3 bits": DQSGD(FixedBits(3), _BLOCK),
        "DQ-SGD, 4 bits": DQSGD(BitBudget(4.0, steps), _BLOCK),
        _OURS: DQSGD(BitBudget(_BITS, steps), _BLOCK),
        "DQ-SGD, bound": DQSGD(ErrorBound(3e-3, steps), _BLOCK),
    }
    return {name: strategy for name, strategy in every.items() if name not in left_out}


def measure(attempt: Attempt) -> Result:
    """Keep a bound on a convex problem, learn a task with every method, judge, and draw."""
    plans = scales(attempt.quick, bool(os.environ.get("THINWIRE_DATA")))
    problem, bounds = parity(load("digits"), WORKERS), list[Kept]()
    for seed in range(plans[0].bounds):
        attempt.begin(f"logistic regression under a bound, seed {seed}")
        bounds.append(kept(problem, error=3e-6, steps=400, lr=0.2 / problem.smoothness, seed=seed))
    found: dict[str, dict[str, list[Learned]]] = {}
    chosen: dict[str, str] = {}
    for plan in plans:
        task, found[plan.task], rates = load(plan.task), {}, list[str]()
        for name, strategy in methods(plan.schedule.steps, plan.left_out).items():
            attempt.begin(f"{plan.task}: {name}")
            found[plan.task][name], rate = _best(task, strategy, plan)
            rates.append(f"{name} {rate}")
        chosen[f"{plan.task}: rates chosen, by the loss of a seed that is not judged"] = ", ".join(rates)
    result = judge(bounds, found)
    data = ", ".join(f"{load(plan.task).title}, rate {_rates(plan)}, {plan.schedule.steps} steps" for plan in plans)
    return attempt.illustrated(
        replace(result, details={**result.details, **chosen, "data": data}),
        lambda: [bits_picture(bounds), *(accuracy_picture(f"{task}-accuracy", runs) for task, runs in found.items())],
    )


def _rates(plan: Scale) -> str:
    """The rates tried, in words."""
    tried, votes = (" or ".join(f"{rate:g}" for rate in rates) for rates in (plan.rates, plan.votes))
    return f"{tried} ({votes} where entries move alike), {plan.seeds} seeds"


def _best(task: Task, strategy: Strategy, plan: Scale) -> tuple[list[Learned], str]:
    """The runs of the rate that learns most with a seed of its own, and that rate in words."""

    def run(rate: float, seed: int) -> Learned:
        schedule = replace(plan.schedule, lr=rate)
        return learned(task, strategy, schedule, workers=WORKERS, seed=seed, model=plan.model)

    votes = isinstance(strategy, AllReduce) and isinstance(strategy.codec, MajorityVote)
    rates = plan.votes if votes else plan.rates
    rate = min(rates, key=lambda each: run(each, 1000).loss) if len(rates) > 1 else next(iter(rates))
    return [run(rate, seed) for seed in range(plan.seeds)], rate_in_words(rate, rates)


def judge(bounds: Sequence[Kept], found: Mapping[str, Mapping[str, Sequence[Learned]]]) -> Result:
    """Whether bounds were kept with few bits, and what was learned with fewer is as good."""
    excess = [run.excess for run in bounds]
    respected = all(run.gap <= run.bound and run.added <= 1 for run in bounds)
    gains = {task: _gains(runs, _RIVAL) for task, runs in found.items()}
    shares = {task: _share(runs, _RIVAL) for task, runs in found.items()}
    return Result(
        parts={
            "bound": judged(respected),
            "fewest bits": at_most(excess, _EXCESS),
            "accuracy": weakest([as_good(each, shares[task]) for task, each in gains.items()]),
        },
        measured=f"bound {'kept' if respected else 'broken'} with {fmean(excess):+.2%} bits more than the fewest; "
        + "; ".join(
            f"{task}: {with_error(each)} beside QSGD of 4 bits, with {shares[task]:.4f} times its bytes"
            for task, each in gains.items()
        ),
        value=fmean(excess),
        least=min(excess),
        most=max(excess),
        details={
            "convex: distance from the optimum, and its bound": ", ".join(
                f"{run.gap:.2e} of {run.bound:.2e}" for run in bounds
            ),
            "convex: share of the allowed error that was used": ", ".join(f"{run.added:.3f}" for run in bounds),
            "convex: mean bits, and the fewest of hindsight": ", ".join(
                f"{fmean(run.bits):.4f} of {run.fewest / len(run.bits):.4f}" for run in bounds
            ),
            **_rows(found),
        },
    )


def as_good(gains: Sequence[float], share: float) -> Outcome:
    """Whether so much accuracy is gained in each seed as that share of a rival's bytes asks for.

    Args:
        gains: of accuracy, seed by seed.
        share: of the rival's bytes that was sent.
    """
    return at_least(gains, -_POINTS if share <= _FEWER else _POINTS)


def _gains(runs: Mapping[str, Sequence[Learned]], rival: str) -> list[float]:
    """Accuracy more than a rival's with the same seed: the same data, order and first parameters."""
    return [ours.accuracy - other.accuracy for ours, other in zip(runs[_OURS], runs[rival], strict=True)]


def _share(runs: Mapping[str, Sequence[Learned]], rival: str) -> float:
    return mean_of(runs[_OURS], "payload_bytes") / mean_of(runs[rival], "payload_bytes")


def _rows(found: Mapping[str, Mapping[str, Sequence[Learned]]]) -> dict[str, Any]:
    beside = {
        f"{task}, {_OURS} beside {name}": f"{with_error(_gains(runs, name))}, {_share(runs, name):.3f} times its bytes"
        for task, runs in found.items()
        for name in runs
        if name != _OURS
    }
    return beside | {
        f"{task}, {name}": f"{in_words(runs)}, {mean_of(runs, 'bits_per_entry'):.3f} bits sent for a parameter and step"
        for task, methods_of in found.items()
        for name, runs in methods_of.items()
    }


CLAIM = Claim.read(__file__, measure, globals())
