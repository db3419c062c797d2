# SPDX-License-Identifier: Apache-2.0
"""What is measured in a run: figures of each step, time intervals of early steps, bytes of the network interface."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Interval
from thinwire.worker.handshake import gather_texts

_CPU = torch.device("cpu")
_FIXED = 6
_SKIPPED_STEPS = 4
_PER_STEP = (
    "seconds_per_step",
    "median_seconds_per_step",
    "payload_bytes_per_worker_per_step",
    "compute_seconds_per_step",
    "exposed_seconds_per_step",
    "train_loss",
)

# -- figures of each step ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """One step of one rank, or the mean of one step over ranks.

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
        """The step's line in metrics.jsonl."""
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


def skipped_step(step: int) -> Record:
    """The record of a step that this rank skipped because it was late; it adds nothing to the means over ranks."""
    return Record(step, -math.inf, math.nan, math.nan, math.nan, math.nan, data_seconds=math.nan)


def share(comm: Comm, mine: Sequence[Record], device: torch.device) -> tuple[list[Record], dict[str, dict[str, float]]]:
    """Gather the ranks' records since the last call.

    Every rank gets the same, so decisions that follow from it need no further messages.

    Returns:
        For each step the mean over ranks, with the latest time; and for each rank its mean seconds per step.
    """
    own_names = json.dumps(sorted({name for record in mine for name in record.metrics}))
    names = sorted({name for text in gather_texts(comm, own_names.encode(), device) for name in json.loads(text)})

    def numbers(record: Record) -> list[float]:
        fixed = [record.seconds, record.loss, record.payload_bytes, record.step_seconds, record.exposed_seconds]
        fixed.append(record.data_seconds)
        return [*fixed, *(record.metrics.get(name, math.nan) for name in names)]

    rows = torch.tensor([numbers(record) for record in mine], dtype=torch.float64, device=device)
    everyone: Tensor = torch.stack([x.cpu() for x in comm.all_gather(rows).wait()])
    # NaN stands for a figure that a rank does not have; nanmean leaves it out.
    means, latest = everyone.nanmean(0).tolist(), everyone[:, :, 0].amax(0).tolist()
    shared: list[Record] = []
    for record, seconds, mean in zip(mine, latest, means, strict=True):
        metrics = {name: x for name, x in zip(names, mean[_FIXED:], strict=True) if math.isfinite(x)}
        shared.append(Record(record.step, seconds, *mean[1 : _FIXED - 1], metrics=metrics))
    times = everyone[:, :, 3:_FIXED].nanmean(1).tolist()
    return shared, {str(rank): worker_times(*seconds) for rank, seconds in enumerate(times)}


def worker_times(step: float, exposed: float, data: float | None = None) -> dict[str, float]:
    """One worker's mean seconds per step: its entry in a line of workers.jsonl."""
    own = {"step_seconds": step, "exposed_seconds": exposed}
    return own if data is None else {**own, "data_seconds": data}


@dataclass
class Totals:
    """Figures of a whole run, from its steps."""

    records: list[Record] = field(default_factory=list[Record])

    def add(self, records: Sequence[Record]) -> None:
        """Add more steps."""
        self.records.extend(records)

    def summary(self) -> dict[str, Any]:
        """Means per step over the whole run, and the training loss over the last tenth of the steps.

        No step is left out: without the first few, the mean would count too often a method that sends every eighth
        step.
        """
        if not self.records:
            return dict.fromkeys(_PER_STEP)
        every = self.records
        tail = self.records[-max(1, len(self.records) // 10) :]
        # The median alone would hide what a method sends only every few steps, so the mean stands beside it.
        figures = (
            fmean(record.step_seconds for record in every),
            median(record.step_seconds for record in every),
            _payload_per_step(every),
            fmean(record.compute_seconds for record in every),
            fmean(record.exposed_seconds for record in every),
            fmean(record.loss for record in tail),
        )
        return dict(zip(_PER_STEP, figures, strict=True))


def _payload_per_step(records: Sequence[Record]) -> float:
    """The payload of a step, over whole periods: up to the last step that sent as much as a round does.

    Where the clock stops a method between two rounds, the mean over all steps would be less than it sends.
    """
    middle = len(records) // 2
    late = [record.payload_bytes - before.payload_bytes for before, record in pairwise(records[middle:])]
    rounds = [place for place, nbytes in enumerate(late, middle + 1) if 2 * nbytes > max(late) > 0]
    end = records[rounds[-1] if rounds else -1]
    return end.payload_bytes / end.step


# -- time intervals of early steps -------------------------------------------------------------------------------------


class Traced(Protocol):
    """An engine whose time intervals can be recorded."""

    @property
    def intervals(self) -> Sequence[Interval]:
        """The intervals recorded so far."""
        ...

    def trace(self, on: bool) -> None:
        """Start or stop recording."""
        ...


@dataclass
class Timeline:
    """Records one rank's intervals of computation, communication and waiting in a window of early steps.

    Args:
        engine: records communication and waits.
        rank: of this worker.
        first: steps done when the run starts; the window opens a few steps later.
        count: steps in the window.
        origin: the moment, in seconds of `time.perf_counter`, that all ranks count from.
    """

    engine: Traced
    rank: int
    first: int
    count: int
    origin: float = 0.0
    steps: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    written: bool = False

    @property
    def _stop(self) -> int:
        # The first steps pay for caches and connections, and would not be typical.
        return self.first + _SKIPPED_STEPS + self.count

    def _covers(self, step: int) -> bool:
        return self._stop - self.count <= step < self._stop

    def begin(self, step: int) -> None:
        """Call before each step, counted from 0."""
        self.engine.trace(self._covers(step))

    def end(self, step: int, start: float, end: float) -> None:
        """Call after each step, with its times in seconds of `time.perf_counter`."""
        if self._covers(step):
            self.steps.append((step, start, end))

    def gather(self, comm: Comm, step: int, *, last: bool) -> list[dict[str, Any]]:
        """Return all ranks' intervals, once, when the window is over; otherwise an empty list."""
        if self.written or not (last or step >= self._stop):
            return []
        self.written = True
        self.engine.trace(False)
        # Messages between two steps, such as those of an evaluation, are no part of training.
        inside = [
            each for each in self.engine.intervals if any(s < each.end and each.start < e for _, s, e in self.steps)
        ]
        waits = [each for each in inside if each.kind == "wait"]
        computation = [piece for one in self.steps for piece in _without(one, waits)]
        spans = [
            {
                "rank": self.rank,
                "kind": each.kind,
                "name": each.name,
                "start": each.start - self.origin,
                "end": each.end - self.origin,
                "step": each.step,
            }
            for each in sorted([*computation, *inside], key=lambda each: each.start)
        ]
        rows = gather_texts(comm, json.dumps(spans).encode(), _CPU)
        return [span for row in rows for span in json.loads(row)]


def _without(step: tuple[int, float, float], waits: Sequence[Interval]) -> list[Interval]:
    """A step's time without the waits in it: computation."""
    number, start, end = step
    pieces: list[Interval] = []
    for wait in sorted(waits, key=lambda wait: wait.start):
        if wait.end <= start or wait.start >= end:
            continue
        if wait.start > start:
            pieces.append(Interval("compute", "compute", start, wait.start, number))
        start = max(start, wait.end)
    return [*pieces, Interval("compute", "compute", start, end, number)] if end > start else pieces


# -- memory ------------------------------------------------------------------------------------------------------------


STATUS = Path("/proc/self/status")


def peak_memory(device: str) -> int:
    """The most bytes that this process has used so far: of the GPU that it trains on, otherwise of the machine."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    # What getrusage says may be the peak of the process that started this one.
    lines = STATUS.read_text(errors="replace").splitlines() if STATUS.is_file() else []
    peak = next((line for line in lines if line.startswith("VmHWM:")), None)
    if peak is not None:
        return 1024 * int(peak.split()[1])
    try:
        import resource
    except ModuleNotFoundError:  # on Windows
        return 0
    # In kibibytes on Linux, in bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# -- bytes of the network interface ------------------------------------------------------------------------------------

COUNTERS = Path("/proc/self/net/dev")


@dataclass(frozen=True)
class WireBytes:
    """Bytes that an interface has sent and received, headers included."""

    sent: int = 0
    received: int = 0

    def __add__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: WireBytes) -> WireBytes:
        return WireBytes(self.sent - other.sent, self.received - other.received)


def read_counters(interface: str) -> WireBytes | None:
    """The kernel's counters of an interface in this network namespace; None where there is none of that name."""
    if not COUNTERS.is_file():
        return None
    for line in COUNTERS.read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            fields = [int(number) for number in numbers.split()]
            # Eight columns about receiving come before those about sending; the first of each is bytes.
            return WireBytes(fields[8], fields[0])
    return None


class InterfaceCounter:
    """Counts an interface's bytes while the training clock runs.

    Args:
        interface: its name; None counts nothing.
    """

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._at_start: WireBytes | None = None
        self._total: WireBytes | None = None

    @property
    def total(self) -> WireBytes | None:
        """Bytes so far; None where nothing can be counted."""
        return self._total

    def start(self) -> None:
        """Start counting."""
        self._at_start = read_counters(self._interface) if self._interface else None

    def stop(self) -> None:
        """Stop counting."""
        now = read_counters(self._interface) if self._interface else None
        if self._at_start is not None and now is not None:
            self._total = (self._total or WireBytes()) + (now - self._at_start)
        self._at_start = None
