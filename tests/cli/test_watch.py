# SPDX-License-Identifier: Apache-2.0
"""`thinwire watch`: a live run, its end, and its state once."""

import json
import threading

from tests.lab.report.samples import write_run
from thinwire.cli import main
from thinwire.lab.runs import launch, resolve


def test_a_live_run_is_shown_until_it_ends(tmp_path, capsys):
    settings = resolve(
        {"task": "digits", "strategy": "LocalSGD(period=4)", "workers": 2, "slow": "1:3x", "steps": 40, "eval_every": 4}
    )
    begun = threading.Event()
    run = threading.Thread(
        target=launch, args=(settings, tmp_path / "run"), kwargs={"listener": lambda event: begun.set()}, daemon=True
    )
    run.start()
    assert begun.wait(60)
    assert main(["watch", str(tmp_path / "run"), "--every", "0.1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    run.join(60)
    assert shown[-1].startswith("ended, step 40 of 40") and "by each worker" in shown[-1]
    assert all(line.startswith("running, step ") for line in shown[:-1])
    assert main(["watch", str(tmp_path / "run"), "--json", "--once"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["members"] == ["0", "1"] and found["slowest"] == "1" and found["because"] == "compute"
    assert (found["state"], found["step"]) == ("ended", 40)


def test_the_state_fits_eighty_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = write_run(tmp_path / "run", steps=60)
    (folder / "workers.jsonl").write_text(
        json.dumps(
            {
                "step": 60,
                "workers": {
                    f"{rank}-0123456789": {"step_seconds": 1 + rank, "exposed_seconds": 0} for rank in range(9)
                },
            }
        )
    )
    assert main(["watch", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "worker 8-0123456789, busy 2.0× as long" in " ".join(shown.split())
    assert "and 1 more" in " ".join(shown.split())


def test_a_run_that_diverged_is_exit_code_1(tmp_path, capsys):
    folder = write_run(tmp_path / "run", steps=4)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "diverged": "the loss is nan"}))
    assert main(["watch", str(folder)]) == 1
    assert capsys.readouterr().out.startswith("diverged, step 4")


def test_mistakes_are_one_message(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--every", "0"]) == 2
    assert "--every 0 is invalid: it must be at least 0.1 seconds" in capsys.readouterr().err
