# SPDX-License-Identifier: Apache-2.0
"""An array of models trains several times as many models in a second as one process after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from reproductions.hfta.losses import Losses, largest, losses
from reproductions.hfta.on_gpu import in_turns_on_gpu
from reproductions.hfta.pictures import difference_picture, pace_picture
from reproductions.hfta.training import WAYS, Pace, Paces, in_turns, ratios, speedup
from reproductions.hfta.workloads import Workload, every
from reproductions.shared.claims import Attempt, Claim, Outcome, Result, at_least, judged
from thinwire.lab.report.statistics import spread

LEAST_SPEEDUP = 2.4
MOST_ROUNDINGS, MOST_DIFFERENCE = 10, 1e-6


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        sizes: numbers of models of the networks of the paper's sizes on a processor, ascending; none without these.
        gpu_sizes: the same on a GPU.
        small: numbers of models of the small networks.
        seconds: that each way trains for, three steps at least.
        gpu_seconds: the same on a GPU.
        steps: of the loss curves, of small networks.
        curves: models whose losses are compared.
        rounds: in which the ways take turns at the most models; once is enough for the others, which are not judged.
    """

    sizes: tuple[int, ...] = (1, 2, 4)
    gpu_sizes: tuple[int, ...] = (1, 4, 16)
    small: tuple[int, ...] = (16,)
    seconds: float = 1.5
    gpu_seconds: float = 0.4
    steps: int = 60
    curves: int = 3
    rounds: int = 3

    def rounds_of(self, name: str, device: str) -> dict[int, int]:
        """Of a network: by the number of models."""
        sizes = self.small if not _as_published(name) else self.gpu_sizes if device == "cuda" else self.sizes
        return {size: self.rounds if size == max(sizes) else 1 for size in sizes}


def _as_published(name: str) -> bool:
    return name.startswith("paper-")


QUICK = Scale(sizes=(), gpu_sizes=(), small=(8,), seconds=0.8, steps=12, rounds=1)


def study(attempt: Attempt) -> Result:
    """Measure every network in every way, compare the losses, draw both, and judge."""
    scale, threads = QUICK if attempt.quick else Scale(), torch.get_num_threads()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = every(device)
    found: dict[str, Losses] = {}
    for workload in (workload for name, workload in kinds.items() if not _as_published(name)):
        attempt.begin(f"losses of {workload.title}")
        found[workload.title] = losses(workload, scale.curves, scale.steps)
    rounds = {name: scale.rounds_of(name, device) for name in kinds}
    if device == "cuda":
        attempt.begin("all networks in turns")
        paces: dict[str, Any] = dict(
            in_turns_on_gpu({n: each for n, each in rounds.items() if each}, scale.gpu_seconds)
        )
    else:
        paces = {}
        for name, sizes in rounds.items():
            for size, turns in sizes.items():
                attempt.begin(f"{kinds[name].title}, {size} models")
                paces.setdefault(name, {})[size] = in_turns(name, size, scale.seconds, threads, turns)
    own = {kinds[name].title: each for name, each in paces.items() if _as_published(name)}
    small = {kinds[name].title: each for name, each in paces.items() if not _as_published(name)}
    seconds = scale.gpu_seconds if device == "cuda" else scale.seconds
    how = f"rounds at the most models: {scale.rounds}, {seconds:g} s a way, in turns, ratios within rounds"
    memory = "memory is that of tensors" if device == "cuda" else "every process keeps its memory"
    told = {"device": _name(device), "threads": threads, "pace of": f"{how}; {memory}"}
    result = judge(own, small, largest(found), told | _data(kinds, own or small), device)
    return attempt.illustrated(result, lambda: (pace_picture(own or small), difference_picture(found)))


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "a processor"


def _data(kinds: Mapping[str, Workload], told: Paces) -> dict[str, str]:
    return {f"data of {each.title}": each.data for each in kinds.values() if each.title in told}


def judge(
    own: Paces,
    small: Paces,
    differences: Mapping[str, Mapping[str, float]],
    details: Mapping[str, Any],
    device: str = "cpu",
) -> Result:
    """Whether losses are the same, and on a GPU, whether every network gains; on a processor its gain is told.

    Args:
        own: networks of the paper's sizes: by network, number of models and way, round by round; may be none.
        small: small networks, which are told, and shown where there are no others.
        differences: by network, those of `largest`.
        details: what else is reported.
        device: "cpu" or "cuda".
    """
    shown = own or small
    largest = {title: sizes[max(sizes)] for title, sizes in shown.items()}
    gains = {title: speedup(found, "array", "process") for title, found in largest.items()}
    slow = [title for title, gain in gains.items() if gain < LEAST_SPEEDUP]
    apart = [title for title, found in differences.items() if not found["fp64"] <= _most(found)]
    value, best = median(gains.values()), max(gains, key=lambda title: gains[title])
    rows: dict[str, Any] = {}
    for title, sizes in (*own.items(), *small.items()):
        for size, found in sizes.items():
            rows[f"{title}, {size} models"] = _in_words(size, found)
    for title, found in differences.items():
        rows[f"{title}, largest difference of the loss curves"] = _apart(found)
    rows["other losses than separate runs, in fp64"] = ", ".join(apart) or "none"
    rows["less than the paper's least"] = ", ".join(slow) or "none"
    rows["slower than the best other way, at the most models"] = ", ".join(_beaten(largest)) or "none"
    words = f"{value:.3g} times as many models in a second (median of {len(gains)} networks; best: {best})"
    low, high = min(gains.values()), max(gains.values())
    parts = {"same losses": judged(not apart), "speed": _speed(own, device)}
    return Result(parts, words, value, low, high, {**rows, **details})


def _speed(own: Paces, device: str) -> Outcome:
    """Whether every network of the paper's sizes gains enough in every round; on a GPU only."""
    if device != "cuda" or not own:
        return Outcome.UNDECIDED
    every_round = [ratios(sizes[max(sizes)], "array", "process") for sizes in own.values()]
    return at_least([min(each) for each in zip(*every_round, strict=True)], LEAST_SPEEDUP)


def _most(found: Mapping[str, float]) -> float:
    """How far losses may be apart in fp64: as what rounding alone does, a few times."""
    return min(MOST_DIFFERENCE, MOST_ROUNDINGS * found["rounding in fp64"])


def _apart(found: Mapping[str, float]) -> str:
    return (
        f"{found['fp64']:.1g} of the first loss in fp64, where separate runs that begin one rounding apart differ by "
        f"{found['rounding in fp64']:.1g}; {found['fp32']:.2g} in fp32, where those differ by {found['rounding']:.2g}"
    )


def _beaten(largest: Mapping[str, Mapping[str, Sequence[Pace]]]) -> list[str]:
    others = [way for way in WAYS if way != "array"]
    gains = {title: {way: speedup(found, "array", way) for way in others} for title, found in largest.items()}
    worst = {title: min(every, key=lambda way: every[way]) for title, every in gains.items()}
    return [
        f"{title} (x {gains[title][way]:.2f} of {WAYS[way]})" for title, way in worst.items() if gains[title][way] < 1
    ]


def _in_words(size: int, found: Mapping[str, Sequence[Pace]]) -> str:
    """The array's pace over every other way's, and its memory per model over that of a process."""
    failed = {way for way in WAYS if not all(pace.models_per_second for pace in found[way])}
    others = [way for way in WAYS if way != "array"]
    over = ", ".join(f"{WAYS[w]} failed" if w in failed else f"x {_ratio(found, w)} {WAYS[w]}" for w in others)
    array, alone = (max(pace.nbytes for pace in found[way]) for way in ("array", "process"))
    each = median(pace.models_per_second for pace in found["array"])
    return f"{each:.4g} steps/s: {over}; memory per model x {array / size / alone:.2f} of a process"


def _ratio(found: Mapping[str, Sequence[Pace]], way: str) -> str:
    """The median of the rounds, and where there are several, their least and greatest."""
    each = ratios(found, "array", way)
    return spread(each).words(".2f") if len(each) > 1 else f"{each[0]:.2f}"


CLAIM = Claim.read(__file__, study, globals())
