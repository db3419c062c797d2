# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from tests.lab.report.samples import SAMPLES, write_comparison, write_run
from thinwire.cli.parsing import parse_command
from thinwire.cli.report import Report
from thinwire.errors import ConfigError
from thinwire.lab.report.page import Written


@pytest.fixture
def run_folder(tmp_path):
    return write_run(tmp_path / "run", SAMPLES[2], steps=10, workers=2)


@pytest.fixture
def unwritten(monkeypatch):
    monkeypatch.setattr("thinwire.cli.report.write_report", lambda folder: Written(folder / "report.html", ()))


def test_the_command_prints_the_page_it_wrote(run_folder, unwritten, capsys):
    assert Report(run_folder)() == 0
    assert capsys.readouterr().out == f"{run_folder / 'report.html'}\n"


@pytest.mark.slow
def test_the_command_prints_every_path_as_json(tmp_path, capsys):
    folder = write_comparison(tmp_path / "two", (SAMPLES[0], SAMPLES[2]), steps=10)
    for sample in ("ddp", "local-sgd"):
        (folder / sample / "metrics.jsonl").unlink()
    assert Report(folder, trace=True, json=True)() == 0
    paths = json.loads(capsys.readouterr().out)
    assert paths["report"] == str(folder / "report.html")
    assert paths["traces"] == [str(folder / "ddp" / "trace.json"), str(folder / "local-sgd" / "trace.json")]
    assert len(paths["plots"]) == 3
    assert all(Path(each).is_file() for each in (paths["report"], *paths["plots"]))


def test_a_trace_of_a_run_without_timeline_is_refused(run_folder, unwritten):
    (run_folder / "timeline.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"timeline\.jsonl"):
        Report(run_folder, trace=True)()


def test_the_page_is_shown_only_when_asked(run_folder, monkeypatch, unwritten):
    shown = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    Report(run_folder)()
    assert shown == []
    Report(run_folder, open=True)()
    assert shown == [(run_folder / "report.html").resolve().as_uri()]


def test_the_flags_are_the_fields(tmp_path):
    command = parse_command("thinwire report", Report, [str(tmp_path), "--trace", "--open"])
    assert command == Report(tmp_path, trace=True, open=True)
    assert parse_command("thinwire report", Report, [str(tmp_path), "--json"]) == Report(tmp_path, json=True)
