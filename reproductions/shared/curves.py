# SPDX-License-Identifier: Apache-2.0
"""How runs went: held-out loss against steps, seconds and learning rates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from pathlib import Path

from thinwire.lab.runs import Comparison, load
from thinwire.lab.runs.folder import Fields


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        steps: at which the consensus model was evaluated, ascending.
        seconds: of training until then.
        losses: its held-out losses, in nats; infinite at the end of a run that diverged.
        seconds_per_step: the mean over the run.
        exposed_seconds_per_step: what of that was spent waiting for messages.
        bytes_per_step: payload that one worker sent, the mean over the run.
    """

    steps: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    seconds_per_step: float
    exposed_seconds_per_step: float
    bytes_per_step: float

    @property
    def by_second(self) -> dict[float, float]:
        """Its losses by time."""
        return dict(zip(self.seconds, self.losses, strict=True))

    @property
    def by_step(self) -> dict[int, float]:
        """Its losses by step."""
        return dict(zip(self.steps, self.losses, strict=True))

    @property
    def last_loss(self) -> float:
        """When the run was done."""
        return self.losses[-1]

    @property
    def last_second(self) -> float:
        """When the run was done."""
        return self.seconds[-1]

    def loss_by(self, seconds: float) -> float:
        """The lowest loss up to the first evaluation at that time or after it, or up to the end.

        Nothing is drawn between evaluations: losses fall along a convex curve, and a straight line lies above it.
        """
        return min(self.losses[: bisect_left(self.seconds, seconds) + 1])


@dataclass(frozen=True)
class Choice:
    """Which learning rate a method got.

    Args:
        losses: the held-out loss with each rate tried, the mean over the seeds of the trials.
    """

    losses: Mapping[float, float]

    @property
    def rate(self) -> float:
        """The one with the lowest loss; a run that diverged counts as the worst."""
        return min(self.losses, key=lambda rate: self.losses[rate] if isfinite(self.losses[rate]) else inf)

    def __str__(self) -> str:
        tried = ", ".join(f"{loss:.3f} at {rate:g}" for rate, loss in self.losses.items())
        edge = ", at the edge of the grid" if self.rate in (min(self.losses), max(self.losses)) else ""
        return f"{self.rate:g}{edge} (loss {tried})"


def curves_of(done: Comparison) -> list[list[Curve]]:
    """For each strategy of a comparison, the curve of every round."""
    return [
        [_curve(folder, summary) for folder, summary in zip(folders, summaries, strict=True)]
        for folders, summaries in zip(done.folders, done.rounds, strict=True)
    ]


def _curve(folder: Path, summary: Fields) -> Curve:
    found = [(row.step, row.seconds, row.eval_loss) for row in load(folder) if not isnan(row.eval_loss)]
    if "diverged" in summary:
        found.append((int(summary["steps"]), float(summary["seconds"]), inf))
    keys = ("seconds_per_step", "exposed_seconds_per_step", "payload_bytes_per_worker_per_step")
    # A run that diverged before its first evaluation has written no step.
    means = [nan if summary[key] is None else float(summary[key]) for key in keys]
    return Curve(
        tuple(step for step, _, _ in found),
        tuple(second for _, second, _ in found),
        tuple(loss for _, _, loss in found),
        *means,
    )
