# SPDX-License-Identifier: Apache-2.0
"""The contents of a run folder: configuration, summary, metrics and timeline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from thinwire.lab.report.files import Facts, text
from thinwire.lab.report.rounds import over_rounds


@dataclass(frozen=True)
class Step:
    """One training step of one rank, or the mean over ranks; NaN where a figure was not recorded.

    Attributes:
        step: steps done, with this one.
        seconds: training time from the start of the run to the end of the step.
        loss: in nats.
        payload_bytes: sent while training so far.
        step_seconds: duration of the step.
        exposed_seconds: the part of it spent only waiting for messages.
        metrics: the method's measurements in this step, by name; the mean over the ranks that have one.
        data_seconds: the part of the step spent reading the batch; only written with the times of each worker.
    """

    step: int
    seconds: float
    loss: float
    payload_bytes: float
    step_seconds: float
    exposed_seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    data_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """The part of the step that was not waiting."""
        return self.step_seconds - self.exposed_seconds

    def line(self) -> dict[str, Any]:
        """Return the step's line in metrics.jsonl."""
        names = ("step", "seconds", "loss", "payload_bytes", "compute_seconds", "exposed_seconds", "step_seconds")
        return {name: getattr(self, name) for name in names} | ({"metrics": self.metrics} if self.metrics else {})


@dataclass
class Totals:
    """Figures of a whole run, from its steps."""

    records: list[Step] = field(default_factory=list[Step])

    def add(self, records: Sequence[Step]) -> None:
        """Add more steps."""
        self.records.extend(records)

    def summary(self) -> dict[str, Any]:
        """Means per step over the whole run, and the training loss over the last tenth of the steps.

        No step is left out: without the first few, the mean would count too often a method that sends every eighth
        step.
        """
        steps = self.records
        if not steps:
            return dict.fromkeys(Totals([Step(1, 0.0, 0.0, 0.0, 0.0, 0.0)]).summary())
        # The median alone would hide what a method sends only every few steps, so the mean stands beside it.
        return {
            "seconds_per_step": fmean(step.step_seconds for step in steps),
            "median_seconds_per_step": median(step.step_seconds for step in steps),
            "payload_bytes_per_worker_per_step": _payload_per_step(steps),
            "compute_seconds_per_step": fmean(step.compute_seconds for step in steps),
            "exposed_seconds_per_step": fmean(step.exposed_seconds for step in steps),
            "train_loss": fmean(step.loss for step in steps[-max(1, len(steps) // 10) :]),
        }


def _payload_per_step(records: Sequence[Step]) -> float:
    """Return the payload of a step, over whole periods: up to the last step that sent as much as a round does.

    Where the clock stops a method between two rounds, the mean over all steps would be less than it sends.
    """
    middle = len(records) // 2
    late = [record.payload_bytes - before.payload_bytes for before, record in pairwise(records[middle:])]
    rounds = [place for place, nbytes in enumerate(late, middle + 1) if 2 * nbytes > max(late) > 0]
    end = records[rounds[-1] if rounds else -1]
    return end.payload_bytes / end.step


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on held-out data, and the step, seconds and bytes at which it took place; NaN if not recorded."""

    step: int
    seconds: float
    payload_bytes: float
    loss: float
    metric: float


@dataclass(frozen=True)
class Span:
    """An interval of one worker's time, in seconds since the common start.

    `kind` is compute, communication or wait. Communication is a message in flight; it may overlap with the others.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    step: int


@dataclass(frozen=True)
class Run:
    """Everything in one run folder; `notes` are sentences on what is missing there.

    `rounds` are the summaries of all runs of this strategy in a comparison, each with a seed of its own; empty for a
    run by itself.
    """

    folder: Path
    label: str
    config: Facts
    summary: Facts
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    spans: tuple[Span, ...]
    notes: tuple[str, ...]
    rounds: tuple[Facts, ...] = ()

    @property
    def strategy(self) -> str:
        """The recipe as text."""
        return text(self.summary, "strategy") or text(self.config, "strategy") or self.folder.name

    @property
    def hides_messages(self) -> bool:
        """Return True if it recorded a timeline without any message."""
        return bool(self.spans) and all(span.kind != "communication" for span in self.spans)

    @property
    def other_links(self) -> str:
        """Return the name of links without a recorded rate: a simulation may have them in a network file."""
        return "links of a simulated network" if self.config.get("simulated") is True else "links not limited"


@dataclass(frozen=True)
class Collection:
    """One run, or the runs of a comparison in their order."""

    folder: Path
    title: str
    runs: tuple[Run, ...]
    notes: tuple[str, ...] = ()

    @property
    def summaries(self) -> list[Facts]:
        """The figures of each run, in order; of several rounds those of all, see `over_rounds`."""
        return [over_rounds(run.rounds or (run.summary,), run.summary) for run in self.runs]
