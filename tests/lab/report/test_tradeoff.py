# SPDX-License-Identifier: Apache-2.0
"""The Pareto front, figures over seeds, time to the target, memory, and graphs in a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import thinwire
from tests.lab.report.samples import SAMPLES, write_comparison, write_run
from tests.lab.report.test_page import without_curves
from thinwire.lab.report import read, write_report
from thinwire.lab.report.tradeoff import front, spread
from thinwire.methods.topology.analysis import matrices


def changed(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    """Two strategies with two seeds each."""
    chosen = (SAMPLES[0], SAMPLES[4])
    write_comparison(tmp_path, chosen, steps=24)
    for sample in chosen:
        write_run(tmp_path / f"{sample.folder}.2", sample, steps=24, seed=9)
        for number, name in enumerate((sample.folder, f"{sample.folder}.2")):
            reached = 10.0 + number if sample.folder == "push-sum" else None
            facts = {"eval_loss": 2.0 + number, "target_loss": 2.5, "seconds_to_target": reached}
            changed(tmp_path / name / "summary.json", **facts, peak_memory_bytes=3e8)
            without_curves(tmp_path / name)
    changed(tmp_path / "comparison.json", rounds={s.folder: [s.folder, f"{s.folder}.2"] for s in chosen})
    return tmp_path


def test_no_point_beats_one_on_the_front() -> None:
    points = [(4.0, 1.0), (1.0, 4.0), (2.0, 4.0), (2.0, 2.0), (3.0, 3.0), (1.0, 5.0), (5.0, 1.0)]
    found = front(points)
    assert found == [1, 3, 0]
    for index in found:
        assert not any(o != points[index] and o[0] <= points[index][0] and o[1] <= points[index][1] for o in points)
    for index in set(range(len(points))) - set(found):
        assert any(points[f][0] <= points[index][0] and points[f][1] <= points[index][1] for f in found)


def test_figures_over_seeds_are_means_with_standard_deviations(comparison: Path) -> None:
    (run, _) = read(comparison).runs
    found = spread(run, lambda facts: facts.get("eval_loss"))
    assert found is not None and found.values == (2.0, 3.0)
    assert found.mean == 2.5 and found.deviation == pytest.approx(0.5**0.5)


@pytest.mark.slow
def test_a_mean_over_fewer_seeds_than_there_are_says_so(comparison: Path) -> None:
    reached = {"seconds_to_target": None, "eval_loss": None, "payload_bytes_per_worker_per_step": 1e9}
    changed(comparison / "push-sum.2/summary.json", **reached, diverged="the loss is nan")
    collection = read(comparison)
    found = spread(collection.runs[1], lambda facts: facts.get("seconds_to_target"))
    assert found is not None and (found.values, found.runs, found.share) == ((10.0,), 2, " (1 of 2 seeds)")
    text = write_report(comparison).report.read_text()
    assert "ddp: none; PushSum: 10.0 s (1 of 2 seeds)" in text
    assert "PushSum: the mean of those that ended (1 of 2 seeds)." in text
    # The bytes are those of the seed whose loss it is.
    assert "On the Pareto front: PushSum" in text


@pytest.mark.slow
def test_the_page_draws_what_a_comparison_is_made_for(comparison: Path) -> None:
    changed(
        comparison / "push-sum/config.json",
        topology={"name": "Ring()", "mixing": matrices(thinwire.Ring(), 4).tolist()},
    )
    written = write_report(comparison)
    names = {path.stem for path in written.plots}
    assert {"pareto", "time-to-target", "held-out-loss", "memory", "topology-0"} <= names
    text = written.report.read_text()
    assert "On the Pareto front: PushSum" in text
    assert "ddp: none; PushSum: 10.5 s" in text
    assert "Graph of 4 workers, Ring()" in text


def test_rounds_outside_the_folder_are_not_read(comparison: Path) -> None:
    changed(comparison / "comparison.json", rounds={"ddp": ["ddp", "../ddp.2"], "push-sum": "push-sum"})
    first, second = read(comparison).runs
    assert len(first.rounds) == 1 and second.rounds == ()
