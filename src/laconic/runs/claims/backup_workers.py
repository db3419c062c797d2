"""With backup workers synchronous SGD is sooner done than with all, without asynchronous SGD's old gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, stdev

from laconic.emulate import Straggler
from laconic.runs.reproductions import Attempt, Claim, Result
from laconic.runs.studies.backup_race import Delays, Race, Ran, run_race
from laconic.strategies.backup_workers import BackupWorkers
from laconic.strategies.base import Strategy
from laconic.strategies.parameter_server import ParameterServer
from laconic.tasks import load

WORKERS = 4
ALL, ASYNCHRONOUS = "b = 0", "asynchronous"
_STEP_SECONDS, _BATCH_SIZE = 0.01, 16
_STALL_PROBABILITY, _STALL_SECONDS, _FACTOR = 0.15, 0.2, 10.0
Races = Mapping[tuple[str, str], Mapping[float, Sequence[Ran]]]
"""Of (which workers are late, method): by learning rate, one race for each seed."""


def _stalling(rank: int, seed: int) -> Straggler:
    return Straggler(stall_probability=_STALL_PROBABILITY, stall_seconds=_STALL_SECONDS, seed=seed, rank=rank)


def _slow(rank: int, seed: int) -> Straggler:
    return Straggler(factor=_FACTOR if rank == WORKERS - 1 else 1.0, seed=seed, rank=rank)


CONDITIONS: dict[str, Delays] = {"workers stall at random": _stalling, "one worker is always slow": _slow}


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        rates: learning rates tried for every method.
        seeds: with which each is run.
        most: the most backups.
        seconds: that a race takes.
    """

    rates: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.8)
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    most: int = 3
    seconds: float = 6.0

    @property
    def methods(self) -> dict[str, Strategy]:
        """By name."""
        backups: dict[str, Strategy] = {f"b = {b}": BackupWorkers(b) for b in range(self.most + 1)}
        return backups | {ASYNCHRONOUS: ParameterServer()}


QUICK = Scale(rates=(0.2, 0.8), seeds=(0, 1), most=2, seconds=2.5)


def measure(attempt: Attempt) -> Result:
    """Race every method at every rate, with workers that stall and with one that is slow."""
    scale, places = QUICK if attempt.quick else Scale(), count()
    task = load("digits")
    races: dict[tuple[str, str], dict[float, list[Ran]]] = {}
    for condition, delays in CONDITIONS.items():
        for name, strategy in scale.methods.items():
            attempt.begin(f"{name}, {condition}", next(places))
            races[condition, name] = {
                lr: [
                    run_race(
                        task, strategy, Race(scale.seconds, _STEP_SECONDS, _BATCH_SIZE, lr, WORKERS), delays, seed=seed
                    )
                    for seed in scale.seeds
                ]
                for lr in scale.rates
            }
    return judge(races, _drawn(attempt, races))


def best(trials: Mapping[float, Sequence[Ran]]) -> float:
    """The learning rate with the lowest mean loss at the end."""
    return min(trials, key=lambda lr: fmean(_end(ran) for ran in trials[lr]))


def judge(races: Races, pictures: Sequence[str]) -> Result:
    """Whether some b above 0 ends with less loss than b = 0, and than asynchronous SGD, whoever is late."""
    chosen = {key: trials[best(trials)] for key, trials in races.items()}
    ends = {key: fmean(_end(ran) for ran in rans) for key, rans in chosen.items()}
    winners = {condition: _winner(ends, condition) for condition, _ in races}
    sooner = {c: ends[c, ALL] / ends[c, name] for c, name in winners.items()}
    fresher = {c: ends[c, ASYNCHRONOUS] / ends[c, name] for c, name in winners.items()}
    told = "; ".join(
        f"{condition}: {name} ends at {ends[condition, name]:.4f}, {ALL} at {ends[condition, ALL]:.4f}, "
        f"{ASYNCHRONOUS} SGD at {ends[condition, ASYNCHRONOUS]:.4f}"
        for condition, name in winners.items()
    )
    return Result(
        holds=min(sooner.values()) > 1 and min(fresher.values()) >= 1,
        measured=told,
        value=fmean(sooner.values()),
        least=min(sooner.values()),
        most=max(sooner.values()),
        details={
            **{f"{name}, {condition}": _words(races[condition, name]) for condition, name in races},
            **{f"for whom to wait by the times of steps, {c}": _advice(chosen[c, ALL]) for c in winners},
            "where it falls short": _shortfalls(sooner, fresher),
            "pictures": " ".join(f"![{name}]({name})" for name in pictures) or "none: matplotlib is missing",
        },
    )


def _winner(ends: Mapping[tuple[str, str], float], condition: str) -> str:
    """The number of backups above 0 that ends with the least loss."""
    names = [name for c, name in ends if c == condition and name not in (ALL, ASYNCHRONOUS)]
    return min(names, key=lambda name: ends[condition, name])


def _shortfalls(sooner: Mapping[str, float], fresher: Mapping[str, float]) -> str:
    lost = [f"{c}: {ALL} ends lower" for c, ratio in sooner.items() if ratio <= 1]
    lost += [f"{c}: {ASYNCHRONOUS} SGD ends lower" for c, ratio in fresher.items() if ratio < 1]
    return "; ".join(lost) or "nowhere"


def _end(ran: Ran) -> float:
    """The mean of the last three looks: one alone is noise."""
    return fmean(ran.losses[-3:])


def _words(trials: Mapping[float, Sequence[Ran]]) -> str:
    lr = best(trials)
    rans = trials[lr]
    ends = [_end(ran) for ran in rans]
    noise = fmean(stdev(ran.losses[-len(ran.losses) // 3 :]) for ran in rans)
    shares = ", ".join(f"{fmean(ran.shares[rank] for ran in rans):.0%}" for rank in range(WORKERS))
    return (
        f"loss {fmean(ends):.4f} ({min(ends):.4f} to {max(ends):.4f}), {fmean(ran.steps for ran in rans):.0f} updates, "
        f"learning rate {lr:g}, deviation over the last third {noise:.4f}, ranks used {shares}"
    )


def _advice(rans: Sequence[Ran]) -> str:
    return ", ".join(f"{ran.best} of {WORKERS}" for ran in rans)


def _drawn(attempt: Attempt, races: Races) -> list[str]:
    """The names of the pictures; none where matplotlib is not installed."""
    try:
        from laconic.runs.studies.backup_pictures import ends_picture, time_picture
    except ModuleNotFoundError:
        return []
    chosen = {key: trials[best(trials)] for key, trials in races.items()}
    return [picture.png(attempt.folder).name for picture in (time_picture(chosen), ends_picture(chosen))]


CLAIM = Claim(
    name="backup-workers",
    sentence="Where workers are late now and then, or one always is, synchronous SGD that waits for the first N of "
    "N + b workers learns faster than with all of them, and suffers from no old gradients as asynchronous SGD does.",
    paper="Chen et al., Revisiting Distributed Synchronous SGD, 2016, arXiv:1604.00981",
    published="in words: with backup workers synchronous training converges in less time and to better accuracy than "
    "asynchronous training, and in less time than without them (its figures, of 100 machines, are not comparable)",
    rule="after the same time, each method at the best of the same learning rates, the best b above 0 has a lower "
    "held-out loss than b = 0 and no higher one than asynchronous SGD, with random stalls and with one slow worker",
    run=measure,
)
