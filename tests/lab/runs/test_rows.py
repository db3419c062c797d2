# SPDX-License-Identifier: Apache-2.0
"""Run folders as rows, and the state of a run while it trains."""

import json
import math

import pytest

from tests.lab.report.samples import SAMPLES, write_comparison
from thinwire.errors import ConfigError
from thinwire.lab.report import read
from thinwire.lab.runs import RunFolder, compare, load, resolve, status, work

ASKED = {"task": "digits", "strategy": "LocalSGD(period=2)", "workers": 1, "threads": 1, "eval_limit": 64}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_rows_hold_what_the_files_hold(tmp_path):
    RunFolder(tmp_path / "run").create()
    work(resolve({**ASKED, "steps": 4, "eval_every": 2, "seed": 3}), tmp_path / "run")
    lines = RunFolder(tmp_path / "run").lines("metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    evaluations = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    rows = load(tmp_path / "run")
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert {(row.run, row.strategy, row.seed) for row in rows} == {("run", "LocalSGD(period=2)", 3)}
    assert {row.step: row.loss for row in rows if not math.isnan(row.loss)} == losses
    assert {row.step: row.eval_loss for row in rows if not math.isnan(row.eval_loss)} == evaluations


def test_rows_of_a_comparison_are_of_all_seeds(tmp_path):
    def start(settings, folder, *, listener):
        RunFolder(folder).create()
        return work(settings, folder)

    recipes = ["LocalSGD(period=2)", "AllReduce()"]
    compare(resolve({**ASKED, "steps": 2}), recipes, tmp_path / "runs", rounds=2, start=start)
    rows = load(tmp_path / "runs")
    assert {(row.strategy, row.seed) for row in rows} == {(recipe, seed) for recipe in recipes for seed in (0, 1)}
    assert len(rows) == 4 * 3  # the evaluation at the start, and two steps


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (2, r"has schema 2: this thinwire reads schemas up to 1\. Upgrade thinwire"),
        ("two", r"has schema 'two': must be 1 to 1\. Restore the file"),
        (0, r"has schema 0: must be 1 to 1"),
        (None, r"has schema None: must be 1 to 1"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "comparison.json"])
def test_an_unknown_schema_is_refused(tmp_path, name, schema, message):
    folder = write_comparison(tmp_path, SAMPLES[:2], steps=4)
    assert {row.strategy for row in load(folder)} == {sample.strategy for sample in SAMPLES[:2]}  # the first schema
    path = tmp_path / SAMPLES[1].folder / name if name == "config.json" else tmp_path / name
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": schema}))
    for reader in (load, read):
        with pytest.raises(ConfigError, match=message):
            reader(folder)


def test_the_state_of_a_run_follows_it_to_its_end(tmp_path):
    settings = resolve({**ASKED, "steps": 4, "eval_every": 2})
    home, found = RunFolder(tmp_path / "run"), []
    home.create()
    home.write_settings(settings)
    found.append(status(home.path))
    work(settings, home.path, emit=lambda event: found.append(status(home.path)))
    found.append(status(home.path))
    assert [each.state for each in found] == ["running"] * (len(found) - 1) + ["ended"]
    assert found[0].step == 0 and found[0].loss is None
    last = found[-1]
    assert (last.step, last.steps, last.members) == (4, 4, ("0",))
    assert last.eval_loss is not None and last.slowest is None


@pytest.mark.parametrize(
    ("times", "wanted"),
    [
        ({"0": (1.0, 0.5, 0.1), "1": (1.0, 0.0, 0.1), "2": (1.0, 0.5, 0.1)}, ("1", "compute", 2.0)),
        ({"0": (1.0, 0.5, 0.1), "1": (1.0, 0.0, 0.6), "2": (1.0, 0.5, 0.1)}, ("1", "data", 2.0)),
        ({"0": (1.0, 0.5, 0.1), "1": (1.0, 0.5, 0.1), "2": (1.0, 0.5, 0.1)}, (None, "wait", None)),
        ({"a-1": (1.0, 0.0, None), "b-2": (1.0, 0.5, None)}, ("a-1", "compute", 2.0)),
        ({"0": (1.0, 0.0, 0.1)}, (None, "wait", None)),
    ],
)
def test_the_slowest_worker_is_the_one_that_is_busy_longest(tmp_path, times, wanted):
    steps = [
        {"step": step, "seconds": step, "loss": 1.0, "payload_bytes": 8 * step}
        | {"step_seconds": 1.0, "exposed_seconds": 0.4, "compute_seconds": 0.6}
        for step in range(1, 101)
    ]
    write_lines(tmp_path / "metrics.jsonl", steps)
    names = ("step_seconds", "exposed_seconds", "data_seconds")
    workers = {
        name: {key: value for key, value in zip(names, each, strict=True) if value is not None}
        for name, each in times.items()
    }
    write_lines(tmp_path / "workers.jsonl", [{"step": 50, "workers": {}}, {"step": 100, "workers": workers}])
    found = status(tmp_path)
    assert (found.slowest, found.because, found.slowdown) == wanted
    assert (found.seconds_per_step, found.bytes_per_step, found.payload_bytes) == (1.0, 8.0, 800.0)
    assert found.wait_share == pytest.approx(0.4) and found.members == tuple(times)
