# SPDX-License-Identifier: Apache-2.0
"""A run of 1-bit LAMB by its two stages: what a step sends and takes in each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from thinwire.lab.runs import Comparison, load


@dataclass(frozen=True)
class Stages:
    """One run: the mean payload of a worker's step in bytes, and the median time of a step in seconds.

    Args:
        warm_bytes: in the first stage.
        coded_bytes: in the second.
        mean_bytes: over the run.
        warm_seconds: in the first stage.
        coded_seconds: in the second.
    """

    warm_bytes: float
    coded_bytes: float
    mean_bytes: float
    warm_seconds: float
    coded_seconds: float

    @property
    def coded_volume(self) -> float:
        """How many times less is sent in the second stage."""
        return self.warm_bytes / self.coded_bytes

    @property
    def volume(self) -> float:
        """How many times less is sent over the run."""
        return self.warm_bytes / self.mean_bytes


def volume_by_formula(share: float, coded_volume: float) -> float:
    """How many times less is sent, where a share of the steps sends everything and the others so many times less."""
    return 1 / (share + (1 - share) / coded_volume)


def stages_of(done: Comparison, place: int, warm_steps: int) -> list[Stages]:
    """The stages of every round of a comparison's strategy in that place."""
    return [_stages(folder, warm_steps) for folder in done.folders[place]]


def step_seconds(done: Comparison, place: int, skipped_steps: int) -> list[float]:
    """The median time of a strategy's steps without the first ones, of every round."""
    return [median(_column(folder, "step_seconds")[skipped_steps:]) for folder in done.folders[place]]


def _stages(folder: Path, warm_steps: int) -> Stages:
    payload, seconds = _column(folder, "payload_bytes"), _column(folder, "step_seconds")
    warm = payload[warm_steps - 1]
    return Stages(
        warm_bytes=warm / warm_steps,
        coded_bytes=(payload[-1] - warm) / (len(payload) - warm_steps),
        mean_bytes=payload[-1] / len(payload),
        warm_seconds=median(seconds[:warm_steps]),
        coded_seconds=median(seconds[warm_steps:]),
    )


def _column(folder: Path, name: str) -> list[float]:
    return [float(getattr(row, name)) for row in load(folder) if row.step]
