# SPDX-License-Identifier: Apache-2.0
"""With backup workers synchronous SGD is sooner done than with all, without asynchronous SGD's old gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nextafter
from statistics import fmean
from typing import TYPE_CHECKING

from reproductions.backup_workers.pictures import ends_picture, time_picture
from reproductions.backup_workers.race import Delays, Race, Ran, run_race
from reproductions.backup_workers.tuning import Tuned, best_of, search_rate
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least
from thinwire import BackupWorkers, ParameterServer, Strategy
from thinwire.lab.emulate import Straggler
from thinwire.lab.report.statistics import ratios, spread
from thinwire.lab.tasks import Task, load

if TYPE_CHECKING:
    from thinwire.lab.report.picture import Picture

WORKERS = 4
ALL, ASYNCHRONOUS = "b = 0", "asynchronous"
# Of the races that are judged: the number of backups that was chosen, and asynchronous SGD at that one's learning rate.
CHOSEN, STALE = "chosen b", "asynchronous at the chosen b's rate"
_RIVALS = {
    "than all workers": ALL,
    "than asynchronous, at its rate": STALE,
    "than asynchronous, at the other's own rate": ASYNCHRONOUS,
}
_LOWER = nextafter(1.0, 2.0)  # a rival's loss over ours: a tie is not lower
_STEP_SECONDS, _BATCH_SIZE = 0.01, 16
_STALL_PROBABILITY, _STALL_SECONDS, _FACTOR = 0.15, 0.2, 10.0


def _stalling(rank: int, seed: int) -> Straggler:
    return Straggler(stall_probability=_STALL_PROBABILITY, stall_seconds=_STALL_SECONDS, seed=seed, rank=rank)


def _slow(rank: int, seed: int) -> Straggler:
    return Straggler(factor=_FACTOR if rank == WORKERS - 1 else 1.0, seed=seed, rank=rank)


CONDITIONS: dict[str, Delays] = {"workers stall at random": _stalling, "one worker is always slow": _slow}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        first: the learning rate at which every method's search for its own begins.
        searched: the seeds of that search, by which the number of backups is chosen as well.
        seeds: others, with which the verdict is made at the rates that were found.
        most: the most backups.
        seconds: that a race takes.
    """

    first: float = 0.4
    searched: tuple[int, ...] = (100, 101, 102)
    seeds: tuple[int, ...] = tuple(range(8))
    most: int = WORKERS - 1
    seconds: float = 3.0

    @property
    def methods(self) -> dict[str, Strategy]:
        """By name."""
        backups: dict[str, Strategy] = {f"b = {b}": BackupWorkers(b) for b in range(self.most + 1)}
        return backups | {ASYNCHRONOUS: ParameterServer()}


QUICK = Scale(searched=(100,), seeds=(0, 1, 2), seconds=2.2)


@dataclass(frozen=True)
class Course:
    """What came of one kind of late workers.

    Attributes:
        tuned: by method, what the search found.
        rans: by arm, its races: one for each seed that is judged, in the same order.
    """

    tuned: Mapping[str, Tuned]
    rans: Mapping[str, Sequence[Ran]]


Courses = Mapping[str, Course]
"""By which workers are late."""


def measure(attempt: Attempt) -> Result:
    """Find every method's rate and the number of backups, then race with other seeds, all arms in turn."""
    scale, task = QUICK if attempt.quick else Scale(), load("digits")
    courses: dict[str, Course] = {}
    for condition, delays in CONDITIONS.items():
        tuned: dict[str, Tuned] = {}
        for name, strategy in scale.methods.items():
            attempt.begin(f"search: {name}, {condition}")
            tuned[name] = _tuned(task, strategy, scale, delays)
        rans: dict[str, list[Ran]] = {}
        for seed in scale.seeds:
            attempt.begin(f"seed {seed}, {condition}")
            for arm, (strategy, lr) in _arms(tuned, scale).items():
                rans.setdefault(arm, []).append(_raced(task, strategy, scale, delays, lr, seed))
        courses[condition] = Course(tuned, rans)
    return attempt.illustrated(judge(courses), lambda: _pictures(courses))


def _tuned(task: Task, strategy: Strategy, scale: Scale, delays: Delays) -> Tuned:
    def trial(lr: float) -> float:
        return fmean(_raced(task, strategy, scale, delays, lr, seed).end for seed in scale.searched)

    tried = search_rate(trial, scale.first)
    return Tuned(best_of(tried), tried)


def chosen(tuned: Mapping[str, Tuned]) -> str:
    """The number of backups above 0 with the lowest loss in the search, at its own rate."""
    return min((name for name in tuned if name not in (ALL, ASYNCHRONOUS)), key=lambda name: tuned[name].loss)


def _arms(tuned: Mapping[str, Tuned], scale: Scale) -> dict[str, tuple[Strategy, float]]:
    """What is raced with every seed that is judged: its strategy and its learning rate."""
    name, methods = chosen(tuned), scale.methods
    return {
        ALL: (methods[ALL], tuned[ALL].rate),
        CHOSEN: (methods[name], tuned[name].rate),
        STALE: (methods[ASYNCHRONOUS], tuned[name].rate),
        ASYNCHRONOUS: (methods[ASYNCHRONOUS], tuned[ASYNCHRONOUS].rate),
    }


def _raced(task: Task, strategy: Strategy, scale: Scale, delays: Delays, lr: float, seed: int) -> Ran:
    race = Race(scale.seconds, _STEP_SECONDS, _BATCH_SIZE, lr, workers=WORKERS)
    return run_race(task, strategy, race, delays, seed=seed)


def judge(courses: Courses) -> Result:
    """Whether the chosen b ends lower than all workers and than asynchronous SGD, seed by seed."""
    ratios = {f"{c}: {part}": _ratios(courses[c].rans, arm) for part, arm in _RIVALS.items() for c in courses}
    parts = {part: at_least(each, _LOWER) for part, each in ratios.items()}
    sooner = [ratio for c in courses for ratio in ratios[f"{c}: {next(iter(_RIVALS))}"]]
    told = "; ".join(
        f"{c}: {chosen(course.tuned)} ends at {_end(course, CHOSEN):.4f}, {ALL} at {_end(course, ALL):.4f}, "
        f"{ASYNCHRONOUS} SGD at {_end(course, STALE):.4f} with the learning rate of {chosen(course.tuned)}, "
        f"at {_end(course, ASYNCHRONOUS):.4f} with its own"
        for c, course in courses.items()
    )
    edges = [f"{name}, {c}" for c, course in courses.items() for name, each in course.tuned.items() if not each.inner]
    return Result(
        parts=parts,
        measured=told,
        value=fmean(sooner),
        least=min(sooner),
        most=max(sooner),
        details={
            **{f"rival's loss over the chosen b's, each seed, {part}": _listed(each) for part, each in ratios.items()},
            **{f"{arm}, {c}": _course(rans) for c, course in courses.items() for arm, rans in course.rans.items()},
            **{f"search, {n}, {c}": _found(each) for c, course in courses.items() for n, each in course.tuned.items()},
            **{f"chosen b, {c}": _choice(course.tuned) for c, course in courses.items()},
            **{f"b by the times of steps, each seed, {c}": _advice(each.rans[ALL]) for c, each in courses.items()},
            "where it falls short": _shortfalls(ratios, parts),
            "learning rates found at an edge": ", ".join(edges) or "none",
        },
    )


def _ratios(rans: Mapping[str, Sequence[Ran]], rival: str) -> list[float]:
    """A rival's loss at the end over the chosen b's, seed by seed: not a number where both have diverged."""
    return list(ratios(*([ran.end for ran in rans[name]] for name in (rival, CHOSEN))).values)


def _end(course: Course, arm: str) -> float:
    return fmean(ran.end for ran in course.rans[arm])


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in ratios)


def _shortfalls(ratios: Mapping[str, Sequence[float]], parts: Mapping[str, Outcome]) -> str:
    lost = [
        f"{part}: lower with {sum(ratio > 1 for ratio in ratios[part])} of {len(ratios[part])} seeds"
        for part, outcome in parts.items()
        if outcome is not Outcome.HOLDS
    ]
    return "; ".join(lost) or "nowhere"


def _choice(tuned: Mapping[str, Tuned]) -> str:
    """Which b was chosen, of which, and whether it is the least or the greatest of them."""
    losses = {name: each.loss for name, each in tuned.items() if name not in (ALL, ASYNCHRONOUS)}
    best, names = chosen(tuned), list(losses)
    edge = ", at an edge of those tried" if best in (names[0], names[-1]) else ""
    told = ", ".join(f"{name}: {loss:.3f}" for name, loss in losses.items())
    return f"{best.removeprefix('b = ')}{edge} (in the search {told})"


def _found(tuned: Tuned) -> str:
    tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(tuned.tried.items()))
    return f"learning rate {tuned.rate:g} (tried {tried})"


def _course(rans: Sequence[Ran]) -> str:
    """How races went: where they end, how far they came, how much they waver, and whose gradients were used."""
    ends = [ran.end for ran in rans]
    noise = fmean(_deviation(ran.losses[-len(ran.losses) // 3 :]) for ran in rans)
    shares = ", ".join(f"{fmean(ran.shares[rank] for ran in rans):.0%}" for rank in range(WORKERS))
    return (
        f"loss {spread(ends).words('.4f', of='mean')}, {fmean(ran.steps for ran in rans):.0f} updates, "
        f"deviation over the last third {noise:.4f}, ranks used {shares}"
    )


def _deviation(losses: Sequence[float]) -> float:
    return spread(losses).deviation if all(map(isfinite, losses)) else inf


def _advice(rans: Sequence[Ran]) -> str:
    return ", ".join(str(WORKERS - ran.best) for ran in rans)


def _pictures(courses: Courses) -> Sequence[Picture]:
    # An arm that has diverged somewhere cannot be drawn, and both kinds of late workers show the same arms.
    arms = [
        arm
        for arm in (ALL, CHOSEN, STALE, ASYNCHRONOUS)
        if all(isfinite(ran.end) for course in courses.values() for ran in course.rans[arm])
    ]
    if not arms:
        return []
    shown = {(condition, arm): course.rans[arm] for condition, course in courses.items() for arm in arms}
    return (time_picture(shown), ends_picture(shown))


CLAIM = Claim.read(__file__, measure, globals())
