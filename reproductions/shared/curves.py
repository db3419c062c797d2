# SPDX-License-Identifier: Apache-2.0
"""How the runs of a comparison went: held-out loss against steps and seconds."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from thinwire.runs.comparison import Comparison
from thinwire.runs.folder import Fields, RunFolder


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        steps: at which the consensus model was evaluated, ascending.
        seconds: of training until then.
        losses: its held-out losses, in nats.
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
    def last_loss(self) -> float:
        """When the run was done."""
        return self.losses[-1]

    @property
    def last_second(self) -> float:
        """When the run was done."""
        return self.seconds[-1]

    def loss_at(self, seconds: float) -> float:
        """The loss at a time, on the straight line between the evaluations around it; the last one after the end."""
        place = bisect_right(self.seconds, seconds)
        if place == 0 or place == len(self.seconds):
            return self.losses[0 if place == 0 else -1]
        (start, end), (first, second) = self.seconds[place - 1 : place + 1], self.losses[place - 1 : place + 1]
        return first + (second - first) * (seconds - start) / (end - start)


def curves_of(done: Comparison) -> list[list[Curve]]:
    """For each strategy of a comparison, the curve of every round."""
    names: dict[str, list[str]] = json.loads((done.folder / "comparison.json").read_bytes())["rounds"]
    return [
        [_curve(done.folder / name, summary) for name, summary in zip(rounds, summaries, strict=True)]
        for rounds, summaries in zip(names.values(), done.rounds, strict=True)
    ]


def _curve(folder: Path, summary: Fields) -> Curve:
    found = [line for line in RunFolder(folder).lines("metrics.jsonl") if "eval_loss" in line]
    return Curve(
        steps=tuple(int(line["step"]) for line in found),
        seconds=tuple(float(line["seconds"]) for line in found),
        losses=tuple(float(line["eval_loss"]) for line in found),
        seconds_per_step=float(summary["seconds_per_step"]),
        exposed_seconds_per_step=float(summary["exposed_seconds_per_step"]),
        bytes_per_step=float(summary["payload_bytes_per_worker_per_step"]),
    )
