# SPDX-License-Identifier: Apache-2.0
import json
from itertools import pairwise

import pytest

from tests.lab.report.samples import SAMPLES, write_run
from thinwire.errors import ConfigError
from thinwire.lab.report import read, write_trace
from thinwire.lab.report.runs import Span
from thinwire.lab.report.trace import trace_events


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "run", SAMPLES[0], steps=20, workers=3)


@pytest.fixture(scope="module")
def events(run_folder):
    return json.loads(write_trace(run_folder).read_text())["traceEvents"]


def test_a_trace_has_one_complete_event_per_span_with_its_duration(run_folder, events):
    spans = sorted(
        (s.rank, s.kind, round(s.start * 1e6, 3), s.end - s.start, s.step) for s in read(run_folder).runs[0].spans
    )
    traced = sorted((e["pid"], e["cat"], e["ts"], e["dur"], e["args"]["step"]) for e in events if e["ph"] == "X")
    assert [(*t[:3], t[4]) for t in traced] == [(*s[:3], s[4]) for s in spans]
    assert [t[3] for t in traced] == pytest.approx([s[3] * 1e6 for s in spans], abs=1e-3)


def test_a_trace_names_every_worker_and_every_lane(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {rank: f"worker {rank}" for rank in range(3)}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {lanes[e["pid"], e["tid"]].split()[0] == e["cat"] for e in events if e["ph"] == "X"} == {True}
    assert {"compute", "communication", "communication 2", "wait"} == set(lanes.values())


def test_messages_that_travel_together_get_a_lane_each():
    spans = [Span(0, "communication", f"bucket {i}", 0.1 * i, 0.1 * i + 0.25, 0) for i in range(6)]
    lanes: dict[int, list[tuple[float, float]]] = {}
    for event in trace_events(spans):
        if event["ph"] == "X":
            lanes.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(lanes) == 3
    for stretches in lanes.values():
        assert all(one[1] <= other[0] for one, other in pairwise(sorted(stretches)))


def test_a_run_without_a_timeline_is_refused_with_the_fix(tmp_path):
    folder = write_run(tmp_path / "run", steps=2)
    (folder / "timeline.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"missing or empty, as it is after a few steps. Train longer"):
        write_trace(folder)
    with pytest.raises(ConfigError, match=r"no such folder"):
        write_trace(tmp_path / "nowhere")
