"""What each rank notes at each step, and what the workers make of it together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from thinwire.comm.base import Comm
from thinwire.worker.handshake import gather_texts

_FIXED = 5


@dataclass(frozen=True)
class Record:
    """One step of one rank, or the mean of one step over ranks.

    Attributes:
        step: steps done with this one.
        seconds: training time since the start of the run, at the end of the step.
        loss: in nats.
        payload_bytes: sent while training so far.
        step_seconds: how long the step took.
        exposed_seconds: how much of that was spent waiting for messages alone.
        observed: what the method noticed in this step, by name; the mean over the ranks that noticed it.
    """

    step: int
    seconds: float
    loss: float
    payload_bytes: float
    step_seconds: float
    exposed_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def compute_seconds(self) -> float:
        """What the step took besides waiting."""
        return self.step_seconds - self.exposed_seconds

    def line(self) -> dict[str, Any]:
        """As it stands in metrics.jsonl."""
        return {
            "step": self.step,
            "seconds": self.seconds,
            "loss": self.loss,
            "payload_bytes": self.payload_bytes,
            "compute_seconds": self.compute_seconds,
            "exposed_seconds": self.exposed_seconds,
            "step_seconds": self.step_seconds,
            **({"metrics": self.metrics} if self.metrics else {}),
        }


def left_out(step: int) -> Record:
    """Of a step that this rank has not taken, as it came too late: nothing to add to what others noted."""
    return Record(step, -math.inf, math.nan, math.nan, math.nan, math.nan)


def share(comm: Comm, mine: Sequence[Record], device: torch.device) -> list[Record]:
    """Gather what the ranks noted since they last met: means over ranks, but the time at which the last was done.

    Every rank gets the same list, so that what they decide from it is the same decision.
    """
    names = _names(comm, mine, device)
    rows = torch.tensor([_numbers(record, names) for record in mine], dtype=torch.float64, device=device)
    everyone: Tensor = torch.stack([x.cpu() for x in comm.all_gather(rows).wait()])
    # A rank that noticed nothing says NaN, which counts for nothing in the mean.
    means, latest = everyone.nanmean(0).tolist(), everyone[:, :, 0].amax(0).tolist()
    return [
        Record(record.step, seconds, *mean[1:_FIXED], metrics=_known(names, mean[_FIXED:]))
        for record, seconds, mean in zip(mine, latest, means, strict=True)
    ]


def _names(comm: Comm, mine: Sequence[Record], device: torch.device) -> list[str]:
    """Of everything that any rank has noticed."""
    noticed = json.dumps(sorted({name for record in mine for name in record.metrics}))
    return sorted({name for text in gather_texts(comm, noticed.encode(), device) for name in json.loads(text)})


def _known(names: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    return {name: value for name, value in zip(names, values, strict=True) if math.isfinite(value)}


def _numbers(record: Record, names: Sequence[str]) -> list[float]:
    fixed = [record.seconds, record.loss, record.payload_bytes, record.step_seconds, record.exposed_seconds]
    return [*fixed, *(record.metrics.get(name, math.nan) for name in names)]


@dataclass
class Totals:
    """Figures of a whole run, from its steps."""

    records: list[Record] = field(default_factory=list[Record])

    def add(self, records: Sequence[Record]) -> None:
        """Take in more steps."""
        self.records.extend(records)

    def summary(self) -> dict[str, Any]:
        """Means per step over the whole run, and the training loss over the last tenth of the steps.

        No step is left out: to drop the first few would count a method that speaks every eighth step too often.
        """
        if not self.records:
            return dict.fromkeys(_PER_STEP)
        last, every = self.records[-1], self.records
        tail = self.records[-max(1, len(self.records) // 10) :]
        # A median alone would hide what a method says only every few steps.
        figures = (
            fmean(record.step_seconds for record in every),
            median(record.step_seconds for record in every),
            last.payload_bytes / last.step,
            fmean(record.compute_seconds for record in every),
            fmean(record.exposed_seconds for record in every),
            fmean(record.loss for record in tail),
        )
        return dict(zip(_PER_STEP, figures, strict=True))


_PER_STEP = (
    "seconds_per_step",
    "median_seconds_per_step",
    "payload_bytes_per_worker_per_step",
    "compute_seconds_per_step",
    "exposed_seconds_per_step",
    "train_loss",
)
