# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json

import numpy as np
import pytest

from tests.lab.report.samples import SAMPLES, write_run
from thinwire.lab.report import read
from thinwire.lab.report.bars import split, time_picture
from thinwire.lab.report.curves import smoothed
from thinwire.lab.report.folder import read_spans
from thinwire.lab.report.palette import looks
from thinwire.lab.report.runs import Span
from thinwire.lab.report.timeline import Window, common_length, intervals, step_starts, timeline_pictures, window


def beat(period: int, steps: int = 48) -> list[Span]:
    """One worker that computes for a second and, every `period` steps, waits for a second's message."""
    spans, clock = [], 0.0
    for step in range(steps):
        spans.append(Span(0, "compute", "step", clock, clock + 1, step))
        clock += 1
        if (step + 1) % period == 0:
            spans.append(Span(0, "communication", "mean", clock, clock + 1, step))
            spans.append(Span(0, "wait", "mean", clock, clock + 1, step))
            clock += 1
    return spans


def test_the_window_has_a_message_in_it_when_there_are_any():
    spans = beat(period=12)
    seen = window(spans, 6.0)
    assert any(seen.start <= span.start < seen.end for span in spans if span.kind == "communication")
    assert seen.start in step_starts(spans)
    assert seen.seconds == 6.0


def test_the_window_avoids_the_blank_of_an_evaluation():
    early = beat(period=2, steps=20)
    pause = early[-1].end + 30
    late = [dataclasses.replace(s, start=s.start + pause, end=s.end + pause, step=s.step + 20) for s in early]
    seen = window([*early, *late], 9.0)
    assert seen.end <= early[-1].end or seen.start >= pause


def test_a_window_longer_than_the_record_shows_all_of_it():
    assert window(beat(period=4, steps=4), 100.0) == Window(0.0, 100.0)


def test_every_run_is_shown_over_the_same_length():
    assert common_length([beat(1), beat(48)]) == pytest.approx(10.0, rel=0.05)
    assert common_length([beat(1)]) == pytest.approx(20.0, rel=0.05)
    assert common_length([]) == 0.0


def test_stretches_are_cut_to_the_window_and_counted_from_its_start():
    spans = [Span(0, "wait", "", 0.0, 2.0, 0), Span(0, "wait", "", 3.0, 9.0, 0), Span(0, "wait", "", 20.0, 21.0, 0)]
    assert intervals(spans, Window(1.0, 5.0)) == [(0.0, 1.0), (2.0, 2.0)]


def test_messages_too_close_to_tell_apart_are_drawn_as_one():
    spans = [Span(0, "communication", "", i / 1000, (i + 0.9) / 1000, 0) for i in range(1000)]
    assert len(intervals(spans, Window(0.0, 1.0))) == 1


def test_smoothing_keeps_a_constant_and_halves_no_length():
    assert np.allclose(smoothed(np.full(130, 2.5)), 2.5)
    assert np.array_equal(smoothed(np.arange(7.0)), np.arange(7.0))
    assert smoothed(np.arange(500.0))[0] == 0.0


def test_a_step_is_split_into_what_was_recorded(tmp_path):
    parts = split({"seconds_per_step": 0.5, "compute_seconds_per_step": 0.2, "exposed_seconds_per_step": 0.3})
    assert parts is not None
    assert (parts.compute, parts.exposed, parts.total) == (0.2, 0.3, 0.5)
    assert split({"seconds_per_step": None}) is None
    collection = read(write_run(tmp_path / "run", SAMPLES[2], steps=6, workers=2))
    picture = time_picture(collection, looks([run.strategy for run in collection.runs]))
    assert picture is not None and "exposed communication" in picture.description
    assert [text.get_text() for text in picture.figure.legends[0].get_texts()] == ["compute", "exposed communication"]


def test_a_run_reads_back_what_was_written(tmp_path):
    (run,) = read(write_run(tmp_path / "run", SAMPLES[2], steps=60, workers=3)).runs
    assert [step.step for step in run.steps] == list(range(1, 61))
    assert [evaluation.step for evaluation in run.evaluations] == [50]
    assert {span.rank for span in run.spans} == {0, 1, 2}
    assert run.notes == ()


def test_intervals_of_unknown_kinds_are_left_out(tmp_path):
    lines = [{"rank": 0, "kind": kind, "name": "", "start": 0, "end": 1} for kind in ("communication", "wait", "rest")]
    (tmp_path / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [span.kind for span in read_spans(tmp_path)] == ["communication", "wait"]


def test_the_worker_that_the_others_wait_for_is_named_under_the_timeline(tmp_path):
    folder = write_run(tmp_path / "run", SAMPLES[2], steps=20, workers=3)
    path = folder / "summary.json"
    for found, words in ((None, ""), ({"rank": 2, "cause": "data", "cost": 0.31}, "worker 2 costs the others 31 %")):
        path.write_text(json.dumps({**json.loads(path.read_text()), "slow_worker": found}))
        collection = read(folder)
        (picture,) = timeline_pictures(collection, looks([run.strategy for run in collection.runs])).values()
        assert ("costs the others" in picture.caption) is bool(words)
        assert words in picture.caption
