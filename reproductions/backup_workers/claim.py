# SPDX-License-Identifier: Apache-2.0
"""With backup workers synchronous SGD is sooner done than with all, without asynchronous SGD's old gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf, isfinite
from statistics import fmean, stdev

from reproductions.backup_workers.race import Delays, Race, Ran, run_race
from reproductions.backup_workers.tuning import Tuned, best_of, search_rate
from reproductions.shared.claims import Attempt, Claim, Earlier, Result, judged
from thinwire.emulate import Straggler
from thinwire.strategies.base import Strategy
from thinwire.strategies.stragglers.backup_workers import BackupWorkers
from thinwire.strategies.stragglers.parameter_server import ParameterServer
from thinwire.tasks import Task, load

WORKERS = 4
ALL, ASYNCHRONOUS = "b = 0", "asynchronous"
_STEP_SECONDS, _BATCH_SIZE = 0.01, 16
_STALL_PROBABILITY, _STALL_SECONDS, _FACTOR = 0.15, 0.2, 10.0
Races = Mapping[tuple[str, str], Tuned]
"""Of (which workers are late, method)."""


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
        searched: the seeds of that search.
        seeds: with which each is run at the rate that was found.
        most: the most backups.
        seconds: that a race takes.
    """

    first: float = 0.4
    searched: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    most: int = 3
    seconds: float = 3.0

    @property
    def methods(self) -> dict[str, Strategy]:
        """By name."""
        backups: dict[str, Strategy] = {f"b = {b}": BackupWorkers(b) for b in range(self.most + 1)}
        return backups | {ASYNCHRONOUS: ParameterServer()}


QUICK = Scale(searched=(100,), seeds=(0, 1, 2), seconds=2.3)


def measure(attempt: Attempt) -> Result:
    """Race every method at its own rate, with workers that stall and with one that is slow."""
    scale, places = QUICK if attempt.quick else Scale(), count()
    task = load("digits")
    races: dict[tuple[str, str], Tuned] = {}
    stale: dict[str, list[Ran]] = {}
    for condition, delays in CONDITIONS.items():
        for name, strategy in scale.methods.items():
            attempt.begin(f"{name}, {condition}", next(places))
            races[condition, name] = _tuned(task, strategy, scale, delays)
        lr = races[condition, _winner(_ends(races), condition)].rate
        attempt.begin(f"{ASYNCHRONOUS} at {lr:g}, {condition}", next(places))
        stale[condition] = [_raced(task, ParameterServer(), scale, delays, lr, seed) for seed in scale.seeds]
    return judge(races, stale, _drawn(attempt, races, stale))


def _tuned(task: Task, strategy: Strategy, scale: Scale, delays: Delays) -> Tuned:
    def trial(lr: float) -> float:
        return fmean(_raced(task, strategy, scale, delays, lr, seed).end for seed in scale.searched)

    tried = search_rate(trial, scale.first)
    lr = best_of(tried)
    return Tuned(lr, tried, tuple(_raced(task, strategy, scale, delays, lr, seed) for seed in scale.seeds))


def _raced(task: Task, strategy: Strategy, scale: Scale, delays: Delays, lr: float, seed: int) -> Ran:
    race = Race(scale.seconds, _STEP_SECONDS, _BATCH_SIZE, lr, workers=WORKERS)
    return run_race(task, strategy, race, delays, seed=seed)


def judge(races: Races, stale: Mapping[str, Sequence[Ran]], pictures: Sequence[str]) -> Result:
    """Whether some b above 0 ends lower than b = 0, and than asynchronous SGD at the same learning rate.

    Args:
        races: of every method, at its own learning rate.
        stale: by who is late, asynchronous SGD at the learning rate of the best b.
        pictures: their names.
    """
    ends = _ends(races)
    winners = {condition: _winner(ends, condition) for condition in stale}
    old = {c: fmean(ran.end for ran in rans) for c, rans in stale.items()}
    sooner = {c: ends[c, ALL] / ends[c, name] for c, name in winners.items()}
    fresher = {c: old[c] / ends[c, name] for c, name in winners.items()}
    tuned = {c: ends[c, ASYNCHRONOUS] / ends[c, name] for c, name in winners.items()}
    told = "; ".join(
        f"{condition}: {name} ends at {ends[condition, name]:.4f}, {ALL} at {ends[condition, ALL]:.4f}, "
        f"{ASYNCHRONOUS} SGD at {old[condition]:.4f} with the learning rate of {name}, "
        f"at {ends[condition, ASYNCHRONOUS]:.4f} with its own"
        for condition, name in winners.items()
    )
    return Result(
        parts={
            **{f"{c}: than all workers": judged(ratio > 1) for c, ratio in sooner.items()},
            **{f"{c}: than asynchronous, at its rate": judged(ratio > 1) for c, ratio in fresher.items()},
            **{f"{c}: than asynchronous, at the other's own rate": judged(ratio > 1) for c, ratio in tuned.items()},
        },
        measured=told,
        value=fmean(sooner.values()),
        least=min(sooner.values()),
        most=max(sooner.values()),
        details={
            **{f"{name}, {condition}": _words(each) for (condition, name), each in races.items()},
            **{
                f"{ASYNCHRONOUS} at the rate of {winners[c]}, {c}": f"{_course(rans)}, learning rate "
                f"{races[c, winners[c]].rate:g}"
                for c, rans in stale.items()
            },
            **{f"b that ends lowest, {c}": name.removeprefix("b = ") for c, name in winners.items()},
            **{f"b by the times of steps, each seed, {c}": _advice(races[c, ALL].rans) for c in winners},
            "where it falls short": _shortfalls(sooner, fresher, tuned),
            "learning rates found at an edge": ", ".join(f"{n}, {c}" for (c, n), t in races.items() if not t.inner)
            or "none",
            "pictures": " ".join(f"![{name}]({name})" for name in pictures) or "none: matplotlib is missing",
        },
    )


def _ends(races: Races) -> dict[tuple[str, str], float]:
    return {key: fmean(ran.end for ran in tuned.rans) for key, tuned in races.items()}


def _winner(ends: Mapping[tuple[str, str], float], condition: str) -> str:
    """The number of backups above 0 that ends with the least loss."""
    names = [name for c, name in ends if c == condition and name not in (ALL, ASYNCHRONOUS)]
    return min(names, key=lambda name: ends[condition, name])


def _shortfalls(sooner: Mapping[str, float], fresher: Mapping[str, float], tuned: Mapping[str, float]) -> str:
    lost = [f"{c}: {ALL} ends lower" for c, ratio in sooner.items() if ratio <= 1]
    lost += [f"{c}: {ASYNCHRONOUS} SGD ends lower at the same learning rate" for c, r in fresher.items() if r <= 1]
    lost += [
        f"{c}: {ASYNCHRONOUS} SGD ends lower at its own learning rate: it throws no gradient away"
        for c, ratio in tuned.items()
        if ratio < 1
    ]
    return "; ".join(lost) or "nowhere"


def _words(tuned: Tuned) -> str:
    shares = ", ".join(f"{fmean(ran.shares[rank] for ran in tuned.rans):.0%}" for rank in range(WORKERS))
    tried = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in sorted(tuned.tried.items()))
    return f"{_course(tuned.rans)}, learning rate {tuned.rate:g} (tried {tried}), ranks used {shares}"


def _course(rans: Sequence[Ran]) -> str:
    """How races went: where they end, how far they came, and how much they waver."""
    ends = [ran.end for ran in rans]
    noise = fmean(_deviation(ran.losses[-len(ran.losses) // 3 :]) for ran in rans)
    return (
        f"loss {fmean(ends):.4f} ({min(ends):.4f} to {max(ends):.4f}), {fmean(ran.steps for ran in rans):.0f} updates, "
        f"deviation over the last third {noise:.4f}"
    )


def _deviation(losses: Sequence[float]) -> float:
    return stdev(losses) if all(map(isfinite, losses)) else inf


def _advice(rans: Sequence[Ran]) -> str:
    return ", ".join(str(WORKERS - ran.best) for ran in rans)


def _drawn(attempt: Attempt, races: Races, stale: Mapping[str, Sequence[Ran]]) -> list[str]:
    """The names of the pictures; none where matplotlib is not installed."""
    try:
        from reproductions.backup_workers.pictures import ends_picture, time_picture
    except ModuleNotFoundError:
        return []
    chosen: dict[tuple[str, str], Sequence[Ran]] = {key: tuned.rans for key, tuned in races.items()}
    if all(isfinite(ran.end) for rans in stale.values() for ran in rans):
        chosen |= {(condition, f"{ASYNCHRONOUS}, best b's rate"): rans for condition, rans in stale.items()}
    return [picture.png(attempt.folder).name for picture in (time_picture(chosen), ends_picture(chosen))]


CLAIM = Claim(
    name="backup-workers",
    sentence="Where workers are late now and then, or one always is, synchronous SGD that waits for the first N of "
    "N + b workers learns faster than with all of them, and at learning rates at which asynchronous SGD suffers from "
    "old gradients.",
    paper="Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981",
    published="in words: with backup workers synchronous training converges in less time and to better accuracy than "
    "asynchronous training, and in less time than without them (its figures, of 100 machines, are not comparable)",
    protocol=f"digits, {WORKERS} workers as threads, with random stalls and with one worker always slow, for the same "
    "time; each method at a learning rate of its own, found by doubling or halving from the same one with seeds apart; "
    "4 seeds (quick: 3)",
    parts={
        **{
            f"{c}: than all workers": "the best b above 0 ends with a lower held-out loss than b = 0"
            for c in CONDITIONS
        },
        **{
            f"{c}: than asynchronous, at its rate": "it ends lower than asynchronous SGD at the learning rate of that b"
            for c in CONDITIONS
        },
        **{
            f"{c}: than asynchronous, at the other's own rate": "it ends lower than asynchronous SGD at its own best "
            "rate"
            for c in CONDITIONS
        },
    },
    costs="with few workers asynchronous SGD at its own learning rate can end lower: its gradients are few steps old, "
    "and it throws none away",
    minutes=(8, 2.5),
    earlier=(
        Earlier(
            "after the same time, each method at a learning rate of its own, the best b above 0 has a lower held-out "
            "loss than b = 0, and than asynchronous SGD at the learning rate of that b, with random stalls and with "
            "one slow worker",
            "holds",
            "asynchronous SGD at its own best rate is the rival that a user has; it was told and not judged",
        ),
        Earlier(
            "after the same time, each method at the best of the same learning rates, the best b above 0 has a lower "
            "held-out loss than b = 0 and no higher one than asynchronous SGD, with random stalls and with one slow "
            "worker",
            "does not hold: with one slow worker asynchronous SGD at its own rate ended lower",
            "it was loosened after this result: the comparison at the other's own rate was taken out",
        ),
    ),
    run=measure,
)
