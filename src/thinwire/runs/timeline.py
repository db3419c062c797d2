"""Who computed, talked and waited when: a window of early steps, on a clock that all ranks share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from thinwire.comm.base import Comm
from thinwire.comm.work import Interval
from thinwire.runs.engine import Engine
from thinwire.worker.handshake import gather_texts

_SKIPPED_STEPS = 4
_CPU = torch.device("cpu")


@dataclass
class Timeline:
    """Records one rank's intervals for some steps.

    Args:
        engine: knows who talked and waited.
        rank: of this worker.
        first: steps done when the run starts; the window opens a few steps later.
        count: steps in the window.
    """

    engine: Engine
    rank: int
    first: int
    count: int
    origin: float = 0.0
    steps: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    written: bool = False

    def begin(self, step: int) -> None:
        """Before a step, counted from 0."""
        self.engine.trace(self._covers(step))

    def end(self, step: int, start: float, end: float) -> None:
        """After it, with its times in seconds of `time.perf_counter`."""
        if self._covers(step):
            self.steps.append((step, start, end))

    def gather(self, comm: Comm, step: int, *, last: bool) -> list[dict[str, Any]]:
        """All ranks' intervals, once the window is over; empty before and after."""
        if self.written or not (last or step >= self._stop()):
            return []
        self.written = True
        self.engine.trace(False)
        rows = gather_texts(comm, json.dumps(self._spans()).encode(), _CPU)
        return [span for row in rows for span in json.loads(row)]

    def _covers(self, step: int) -> bool:
        return self._stop() - self.count <= step < self._stop()

    def _stop(self) -> int:
        return self.first + _SKIPPED_STEPS + self.count

    def _spans(self) -> list[dict[str, Any]]:
        # What was said at a meeting, between two steps, is no part of training.
        said = [
            each for each in self.engine.intervals if any(s < each.end and each.start < e for _, s, e in self.steps)
        ]
        waits = [each for each in said if each.kind == "wait"]
        pieces = [piece for step in self.steps for piece in _between(step, waits)]
        return [
            {
                "rank": self.rank,
                "kind": each.kind,
                "name": each.name,
                "start": each.start - self.origin,
                "end": each.end - self.origin,
                "step": each.step,
            }
            for each in sorted([*pieces, *said], key=lambda each: each.start)
        ]


def _between(step: tuple[int, float, float], waits: Sequence[Interval]) -> list[Interval]:
    """What is left of a step when the waits are taken out: computation."""
    number, start, end = step
    pieces: list[Interval] = []
    for wait in sorted(waits, key=lambda wait: wait.start):
        if wait.end <= start or wait.start >= end:
            continue
        if wait.start > start:
            pieces.append(Interval("compute", "compute", start, wait.start, number))
        start = max(start, wait.end)
    return [*pieces, Interval("compute", "compute", start, end, number)] if end > start else pieces
