# SPDX-License-Identifier: Apache-2.0
"""Runs of real workers, and how they end."""

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from thinwire.cli import main
from thinwire.errors import ConfigError, NonFiniteError, PeerLostError, ThinwireError
from thinwire.lab.emulate import available
from thinwire.lab.runs import RunFolder, launch, resolve
from thinwire.lab.runs.launcher import WorkerOutput, failure_of

QUICK = ["--task", "digits", "--workers", "2", "--eval-limit", "64", "--threads", "1"]
REASON = available()


def read(path: Path):
    return json.loads(path.read_text())


@pytest.mark.slow
def test_train_writes_a_folder_with_everything_that_happened(tmp_path, capsys):
    folder = tmp_path / "run"
    code = main(["train", *QUICK, "--steps", "8", "--strategy", "LocalSGD(period=2)", "--out", str(folder)])
    assert code == 0
    summary = read(folder / "summary.json")
    assert (summary["strategy"], summary["workers"], summary["steps"]) == ("LocalSGD(period=2)", 2, 8)
    assert summary["payload_bytes_per_worker_per_step"] == 2 * read(folder / "config.json")["parameters"]
    assert summary["wire_bytes_per_worker_per_step"] is None
    rows = RunFolder(folder).lines("metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert {row["rank"] for row in RunFolder(folder).lines("timeline.jsonl")} == {0, 1}
    assert [row["rank"] for row in read(folder / "links.json")] == [0, 1]
    assert str(folder) in capsys.readouterr().out


@pytest.mark.slow
def test_compare_runs_each_strategy_from_the_same_start(tmp_path, capsys):
    folder = tmp_path / "both"
    code = main(["compare", *QUICK, "--steps", "6", "--strategies", "ddp; AllReduce()", "--out", str(folder)])
    assert code == 0
    assert read(folder / "comparison.json")["runs"] == ["ddp", "AllReduce"]
    first = [RunFolder(folder / name).lines("metrics.jsonl")[1]["loss"] for name in ("ddp", "AllReduce")]
    assert first[0] == first[1]
    out = capsys.readouterr().out
    assert "ddp" in out and "AllReduce" in out and str(folder) in out


@pytest.mark.slow
@pytest.mark.emulation
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_bytes_on_an_emulated_link_are_the_payload_and_its_headers(tmp_path, capsys):
    folder = tmp_path / "run"
    code = main(["train", *QUICK, "--steps", "8", "--link", "1gbit", "--out", str(folder), "--json"])
    assert code == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary == read(folder / "summary.json")
    payload, wire = (summary[f"{kind}_bytes_per_worker_per_step"] for kind in ("payload", "wire"))
    assert payload < wire < 1.2 * payload + 1000
    assert [row["bits_per_second"] for row in read(folder / "links.json")] == [1e9, 1e9]


def kill_when_it_trains(folder: Path, pid: Callable[[], int], moment: list[float]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if any("loss" in row for row in RunFolder(folder).lines("metrics.jsonl")):
            moment.append(time.monotonic())
            os.kill(pid(), signal.SIGKILL)
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_one_message_that_names_it_and_the_step(tmp_path, capsys, pids):
    folder, moment = tmp_path / "run", []
    killer = threading.Thread(target=kill_when_it_trains, args=(folder, lambda: pids()[1], moment))
    killer.start()
    code = main(["train", *QUICK, "--seconds", "90", "--out", str(folder)])
    ended = time.monotonic()
    killer.join()
    assert code == 1
    assert ended - moment[0] < 20
    messages = [line for line in capsys.readouterr().err.splitlines() if line.startswith("thinwire:")]
    assert len(messages) == 1
    assert "worker 1 was ended by SIGKILL after step" in messages[0]
    assert messages[0].count(" step ") == 1, "each survivor noticed it at a step of its own"
    assert not (folder / "summary.json").exists()


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a run already"):
        launch(resolve({"task": "digits"}), tmp_path)


def ended(rank=1, number=None):
    return SimpleNamespace(failure=_Exit(rank, number))


class _Exit:
    def __init__(self, rank, number):
        self.rank, self.signal = rank, number

    def __str__(self):
        return (
            f"worker {self.rank} was ended by signal" if self.signal else f"worker {self.rank} ended with exit code 1"
        )


def output_of(*events):
    output = WorkerOutput(lambda _: None)
    for rank, content in events:
        output.add_line(rank, "stdout", content if isinstance(content, str) else json.dumps(content))
    return output


def error(kind, message):
    return {"event": "error", "kind": kind, "message": message}


def test_the_cause_is_reported_and_not_what_it_caused_on_other_ranks(tmp_path):
    output = output_of((0, error("PeerLostError", "rank 1 is lost")), (1, error("NonFiniteError", "rank 1: nan")))
    found = failure_of(ended(0), output, RunFolder(tmp_path))
    assert type(found) is NonFiniteError and str(found) == "rank 1: nan"


def test_a_kill_explains_the_loss_of_a_rank(tmp_path):
    output = output_of((0, {"event": "step", "step": 7}), (0, error("PeerLostError", "rank 0, step 8: rank 1 is lost")))
    home = RunFolder(tmp_path)
    home.write_settings(resolve({"task": "digits"}))
    found = failure_of(ended(1, 9), output, home)
    assert type(found) is PeerLostError
    # The step that training had reached, and not also the steps at which others noticed.
    assert "after step 7. Use --save-every" in str(found) and "step 8" not in str(found)
    home.write_settings(resolve({"task": "digits", "save_every": 50}))
    assert "after step 7. It had not saved yet (--save-every 50)" in str(failure_of(ended(1, 9), output, home))
    (home.checkpoints / "step-00000001").mkdir(parents=True)
    assert f"--resume {tmp_path}" in str(failure_of(ended(1, 9), output, home))


def test_a_crash_is_reported_by_its_last_line_and_kept_whole(tmp_path):
    output = output_of((1, "Traceback (most recent call last):"), (1, "ZeroDivisionError: division by zero"))
    found = failure_of(ended(), output, RunFolder(tmp_path))
    assert type(found) is ThinwireError and "ZeroDivisionError" in str(found)
    assert "Traceback" in (tmp_path / "worker-1.log").read_text()


def test_lines_that_are_no_events_are_kept_and_events_are_passed_on():
    events = []
    output = WorkerOutput(events.append)
    for line in ("plain", "[1]", '{"a": 1}', '{"event": "step", "step": 3}'):
        output.add_line(0, "stdout", line)
    output.add_line(0, "stderr", '{"event": "step", "step": 9}')
    assert [event["step"] for event in events] == [3] and output.step == 3
    assert output.lines[0] == deque(["plain", "[1]", '{"a": 1}', '{"event": "step", "step": 9}'])
