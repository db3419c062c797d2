# SPDX-License-Identifier: Apache-2.0
"""Measurements of a run: figures of each step, time intervals of early steps, bytes of the network interface."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.core.comm.base import Comm
from thinwire.core.comm.work import Interval
from thinwire.lab.emulate.network import Traffic, traffic_in
from thinwire.lab.report.runs import Step
from thinwire.lab.runs.baselines import Engine
from thinwire.worker.handshake import gather_texts

_CPU = torch.device("cpu")
_FIXED = 6
_SKIPPED_STEPS = 4

# -- figures of each step ----------------------------------------------------------------------------------------------


def skipped_step(step: int) -> Step:
    """The record of a step that this rank skipped because it was late; it adds nothing to the means over ranks."""
    return Step(step, -math.inf, math.nan, math.nan, math.nan, math.nan, data_seconds=math.nan)


def share(comm: Comm, mine: Sequence[Step], device: torch.device) -> tuple[list[Step], dict[str, dict[str, float]]]:
    """Gather the ranks' records since the last call.

    Every rank gets the same, so decisions that follow from it need no further messages.

    Returns:
        For each step the mean over ranks, with the latest time; and for each rank its mean seconds per step.
    """
    own_names = json.dumps(sorted({name for record in mine for name in record.metrics}))
    names = sorted({name for text in gather_texts(comm, own_names.encode(), device) for name in json.loads(text)})

    def numbers(record: Step) -> list[float]:
        fixed = [record.seconds, record.loss, record.payload_bytes, record.step_seconds, record.exposed_seconds]
        fixed.append(record.data_seconds)
        return [*fixed, *(record.metrics.get(name, math.nan) for name in names)]

    rows = torch.tensor([numbers(record) for record in mine], dtype=torch.float64, device=device)
    everyone: Tensor = torch.stack([x.cpu() for x in comm.all_gather(rows).wait()])
    # NaN stands for a figure that a rank does not have; nanmean leaves it out.
    means, latest = everyone.nanmean(0).tolist(), everyone[:, :, 0].amax(0).tolist()
    shared: list[Step] = []
    for record, seconds, mean in zip(mine, latest, means, strict=True):
        metrics = {name: x for name, x in zip(names, mean[_FIXED:], strict=True) if math.isfinite(x)}
        shared.append(Step(record.step, seconds, *mean[1 : _FIXED - 1], metrics=metrics))
    times = everyone[:, :, 3:_FIXED].nanmean(1).tolist()
    return shared, {str(rank): worker_times(*seconds) for rank, seconds in enumerate(times)}


def worker_times(step: float, exposed: float, data: float | None = None) -> dict[str, float]:
    """Return one worker's mean seconds per step: its entry in a line of workers.jsonl."""
    own = {"step_seconds": step, "exposed_seconds": exposed}
    return own if data is None else {**own, "data_seconds": data}


# -- time intervals of early steps -------------------------------------------------------------------------------------


@dataclass
class Timeline:
    """Steps one rank's intervals of computation, communication and waiting in a window of early steps.

    Args:
        engine: records communication and waits.
        rank: of this worker.
        first: steps done when the run starts; the window opens a few steps later.
        count: steps in the window.
        origin: the moment, in seconds of `time.perf_counter`, that all ranks count from.
    """

    engine: Engine
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
            {"rank": self.rank, **asdict(each), "start": each.start - self.origin, "end": each.end - self.origin}
            for each in sorted([*computation, *inside], key=lambda each: each.start)
        ]
        rows = gather_texts(comm, json.dumps(spans).encode(), _CPU)
        return [span for row in rows for span in json.loads(row)]


def _without(step: tuple[int, float, float], waits: Sequence[Interval]) -> list[Interval]:
    """Return a step's time without the waits in it: computation."""
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


def read_counters(interface: str) -> Traffic | None:
    """Return the kernel's counters of an interface in this network namespace; None where there is none of that name."""
    return traffic_in(COUNTERS.read_text(), interface) if COUNTERS.is_file() else None


class InterfaceCounter:
    """Counts an interface's bytes while the training clock runs.

    Args:
        interface: its name; None counts nothing.
    """

    def __init__(self, interface: str | None) -> None:
        self._interface = interface
        self._at_start: Traffic | None = None
        self._total: Traffic | None = None

    @property
    def total(self) -> Traffic | None:
        """Bytes so far; None where nothing can be counted."""
        return self._total

    def start(self) -> None:
        """Start counting."""
        self._at_start = read_counters(self._interface) if self._interface else None

    def stop(self) -> None:
        """Stop counting."""
        now = read_counters(self._interface) if self._interface else None
        if self._at_start is not None and now is not None:
            self._total = (self._total or Traffic()) + (now - self._at_start)
        self._at_start = None
