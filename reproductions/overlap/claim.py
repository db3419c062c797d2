# SPDX-License-Identifier: Apache-2.0
"""Overlap Local-SGD hides its averages behind computation, learns like synchronous SGD, and bears unlike data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from reproductions.overlap.pictures import loss_picture, waiting_picture
from reproductions.shared.claims import Attempt, Claim, Result, at_least, at_most, emulated, ended, judged
from reproductions.shared.threads import Schedule, train_on_threads
from thinwire import parse
from thinwire.lab.report.statistics import ratios, spread
from thinwire.lab.runs import Comparison
from thinwire.lab.runs.folder import Fields
from thinwire.lab.tasks import Task, load

PERIOD = 8
_LINK = "100mbit"
_STALL = "0.05:200ms"
_WAITING, _POINTS = 0.02, 0.01
_WORKERS, _BATCH_SIZE, _STEPS = 4, 16, 120
_SPLITS = {"like data": "iid", "unlike data": "dirichlet(0.1)"}
METHODS = {
    "synchronous SGD": "AllReduce()",
    "Local SGD": f"LocalSGD(period={PERIOD})",
    "Overlap Local-SGD": f"OverlapLocalSGD(period={PERIOD})",
    "CoCoD-SGD": f"CoCoD(period={PERIOD})",
}
Progress = Callable[[str], None]
Ends = dict[tuple[str, str], dict[float, list[tuple[float, float]]]]


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        rates: learning rates tried for every method.
        seeds: with which each is run; they decide the initial parameters and how data are divided and ordered.
        timed_steps: of the runs over the link; they end just before a message, behind which nothing could hide.
        rounds: how often each of these is run.
    """

    rates: tuple[float, ...] = (0.025, 0.05, 0.1, 0.2)
    seeds: tuple[int, ...] = tuple(range(8))
    timed_steps: int = 10 * PERIOD - 1
    rounds: int = 3


QUICK = Scale(rates=(0.05, 0.1), seeds=(0, 1, 2), timed_steps=4 * PERIOD - 1, rounds=3)


def measure(attempt: Attempt) -> Result:
    """Time what is exposed over a slow link, with and without stalls; then train on like and on unlike data."""
    scale, link = QUICK if attempt.quick else Scale(), emulated(_LINK)
    timed = {
        name: _timed(attempt, scale, link, stall)
        for name, stall in (("even workers", None), ("stalling workers", _STALL))
    }
    ends = _trained(scale, attempt.begin)
    losses = {key: {lr: [loss for loss, _ in pairs] for lr, pairs in trials.items()} for key, trials in ends.items()}
    return attempt.illustrated(
        judge(timed, ends, link), lambda: (waiting_picture(_shares(timed)), loss_picture(losses))
    )


def _timed(attempt: Attempt, scale: Scale, link: str | None, stall: str | None) -> Comparison:
    asked = {"task": "text", "model": "0.5m", "workers": _WORKERS, "link": link, "stall": stall, "batch_size": 6}
    done = attempt.compare(
        "stalled" if stall else "even",
        list(METHODS.values())[:3],
        {**asked, "steps": scale.timed_steps, "eval_every": scale.timed_steps, "eval_limit": 16},
        rounds=scale.rounds,
        title=f"Waiting over {link or 'loopback'}{', with stalls of ' + stall if stall else ''}",
    )
    return ended(done)


def _trained(scale: Scale, begin: Progress) -> Ends:
    """Loss and accuracy on held-out data of every method at every rate: one pair for each seed."""
    task = load("digits")
    found: Ends = {}
    for words, split in _SPLITS.items():
        for name, recipe in METHODS.items():
            begin(f"{name}, {words}")
            found[words, name] = {
                lr: [_end(task, recipe, lr, split, seed) for seed in scale.seeds] for lr in scale.rates
            }
    return found


def _end(task: Task, recipe: str, lr: float, split: str, seed: int) -> tuple[float, float]:
    schedule = Schedule(_STEPS, _BATCH_SIZE, lr, momentum=0.9)
    ended = train_on_threads(task, parse(recipe), schedule, workers=_WORKERS, split=split, seed=seed)
    return ended.loss, ended.metric


def best(trials: Mapping[float, Sequence[tuple[float, float]]]) -> float:
    """The learning rate with the lowest mean loss."""
    return min(trials, key=lambda lr: fmean(loss for loss, _ in trials[lr]))


def waiting(summaries: Sequence[Fields]) -> list[float]:
    """Which share of its time a worker only waits, in each round."""
    return [summary["exposed_seconds_per_step"] / summary["seconds_per_step"] for summary in summaries]


def _shares(timed: Mapping[str, Comparison]) -> dict[tuple[str, str], list[float]]:
    return {
        (when, name): waiting(summaries)
        for when, done in timed.items()
        for name, summaries in zip(METHODS, done.rounds, strict=False)
    }


def judge(timed: Mapping[str, Comparison], ends: Ends, link: str | None) -> Result:
    """Whether little is exposed, little is lost, and unlike data do less harm than to CoCoD-SGD."""
    shares = _shares(timed)
    ours = shares["even workers", "Overlap Local-SGD"]
    theirs = shares["even workers", "Local SGD"]
    chosen = {key: trials[best(trials)] for key, trials in ends.items()}
    accuracy = {key: fmean(metric for _, metric in each) for key, each in chosen.items()}
    loss = {key: fmean(each for each, _ in pairs) for key, pairs in chosen.items()}
    stalled = timed["stalling workers"]
    sooner = ratios(*(_step_times(stalled, name) for name in ("Overlap Local-SGD", "Local SGD"))).values
    as_good = accuracy["like data", "synchronous SGD"] - accuracy["like data", "Overlap Local-SGD"] <= _POINTS
    sturdy = loss["unlike data", "Overlap Local-SGD"] < loss["unlike data", "CoCoD-SGD"]
    return Result(
        parts={
            "hidden": at_most(ours, _WAITING),
            "exposed without": at_least(theirs, _WAITING),
            "stragglers": at_most(sooner, 1.0),
            "like data": judged(as_good),
            "unlike data": judged(sturdy),
        },
        measured=f"waiting {median(theirs):.1%} of the time with Local SGD, {median(ours):.1%} with Overlap Local-SGD; "
        + "; ".join(f"{words}: {_against(loss, accuracy, words)}" for words in _SPLITS),
        value=median(ours),
        least=min(ours),
        most=max(ours),
        details={
            **{f"waiting, {name}, {when}": spread(each).words(".1%") for (when, name), each in shares.items()},
            **{
                f"seconds per step, {name}, {when}": spread(_step_times(timed[when], name)).words(".4f")
                for when, name in shares
            },
            **{f"held-out loss, {name}, {words}": _spread(ends[words, name]) for words, name in ends},
            "with stalls, time per step over Local SGD's, by round": ", ".join(f"{ratio:.3f}" for ratio in sooner),
            "link": link or "none: namespaces are not available here",
        },
    )


def _against(loss: Mapping[tuple[str, str], float], accuracy: Mapping[tuple[str, str], float], words: str) -> str:
    return ", ".join(f"{name} {loss[words, name]:.4f} ({accuracy[words, name]:.2%})" for name in METHODS)


def _step_times(done: Comparison, name: str) -> list[float]:
    """Seconds per step, round by round."""
    return [summary["seconds_per_step"] for summary in done.rounds[list(METHODS).index(name)]]


def _spread(trials: Mapping[float, Sequence[tuple[float, float]]]) -> str:
    lr = best(trials)
    losses = [loss for loss, _ in trials[lr]]
    return f"{spread(losses).words('.4f', of='mean')}, learning rate {lr:g}"


CLAIM = Claim.read(__file__, measure, {**globals(), "points": 100 * _POINTS})
