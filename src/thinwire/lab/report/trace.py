# SPDX-License-Identifier: Apache-2.0
"""A run's timeline in the trace-event format that Perfetto and Chrome's tracing page open."""

import json
from collections.abc import Sequence
from pathlib import Path

from thinwire.errors import ConfigError
from thinwire.lab.report.files import write_text
from thinwire.lab.report.folder import read_spans
from thinwire.lab.report.runs import Span

# The first thread number of each kind; a worker has up to a hundred lanes of one kind.
_LANES = {"compute": 0, "communication": 100, "wait": 200}


def write_trace(run_folder: Path) -> Path:
    """Write a run's timeline as `trace.json` into its folder, and return the path.

    Workers are shown as processes, and compute, communication and wait as their threads. Messages that are in flight
    at the same time get one thread each, because the format allows no overlap within a thread.

    Raises:
        ConfigError: the folder has no timeline, or an empty one.
    """
    spans = read_spans(run_folder)
    if not spans:
        raise ConfigError(f"{run_folder}: timeline.jsonl is missing or empty, as it is after a few steps. Train longer")
    document = {"traceEvents": trace_events(spans), "displayTimeUnit": "ms"}
    return write_text(run_folder / "trace.json", json.dumps(document, separators=(",", ":")))


def trace_events(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return the trace events of a timeline: names for processes and threads, then one event per span."""
    # Each span gets the first lane of its kind that is free when it starts.
    busy: dict[tuple[int, str], list[float]] = {}
    placed: list[tuple[Span, int]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        ends = busy.setdefault((span.rank, span.kind), [])
        lane = next((index for index, end in enumerate(ends) if end <= span.start), len(ends))
        ends[lane : lane + 1] = [span.end]
        placed.append((span, _LANES[span.kind] + lane))
    events: list[dict[str, object]] = []
    for rank in sorted({span.rank for span in spans}):
        events.append(_metadata("process_name", rank, 0, {"name": f"worker {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    for rank, lane, kind in sorted({(span.rank, lane, span.kind) for span, lane in placed}):
        extra = lane - _LANES[kind]
        events.append(_metadata("thread_name", rank, lane, {"name": f"{kind} {extra + 1}" if extra else kind}))
        events.append(_metadata("thread_sort_index", rank, lane, {"sort_index": lane}))
    for span, lane in placed:
        events.append(
            {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                # Microseconds.
                "ts": round(span.start * 1e6, 3),
                "dur": round((span.end - span.start) * 1e6, 3),
                "pid": span.rank,
                "tid": lane,
                "args": {"step": span.step},
            }
        )
    return events


def _metadata(name: str, rank: int, lane: int, arguments: dict[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": rank, "tid": lane, "args": arguments}
