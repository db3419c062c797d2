# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a call: what the one line says that refuses it."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thinwire.cli import console, main
from thinwire.lab.runs import Settings
from thinwire.lab.runs.folder import RunFolder
from thinwire.planning.doctor import examination
from thinwire.planning.doctor.findings import Examination


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The line that refuses a call with exit code 2."""
    assert main(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("thinwire: ") and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("thinwire: ").removesuffix("\n")


@pytest.mark.parametrize("name", ["out", "err"])
def test_names_between_colons_are_no_pictures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(getattr(console, name), "_file", written)
    getattr(console, name).print("--model mine:train: a:b:", markup=False)
    assert written.getvalue() == "--model mine:train: a:b:\n"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("train --lr abc", "--lr abc: must be a number, such as 0.1"),
        ("train --workers=x", "--workers x: must be a whole number, such as 4"),
        ("train --batch_size 1e3", "--batch-size 1e3: must be a whole number, such as 4"),
        ("explain AllReduce --parameters abc", "--parameters abc: must be a number, such as 6.5e6"),
        ("explain AllReduce --workers 1.5", "--workers 1.5: must be a whole number, such as 4"),
        ("explain AllReduce --dtype int8", "--dtype int8: must be float64, float32, bfloat16 or float16"),
        ("completion tcsh", "tcsh: must be bash, zsh or fish"),
        ("train --lr", "--lr: needs a value, such as 0.1"),
        ("train --data --steps 3", "--data: needs a value"),
        ("train --steps 3 --steps 4", "--steps: is given twice. Give it once"),
    ],
)
def test_a_value_that_cannot_be_read_is_refused_in_one_line(
    call: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, *call.split()) == words


def test_values_of_a_command_that_is_run_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["emulate", "--workers", "1", "--", "true", "--workers", "x"]
    assert main(call) == 0
    assert "must be" not in capsys.readouterr().err


@pytest.mark.parametrize("call", ["train --lr None --workers abc --help", "topology --workers=abc -h"])
def test_help_is_shown_beside_a_mistake(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(call.split()) == 0
    assert "Usage: thinwire" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("train --resume nope", "--resume nope: no such folder. Give that of a run that was trained with --save-every"),
        ("train --resume file", "--resume file: is a file, not a folder. Give that of a run"),
        ("train --resume .", "--resume .: holds no run, because it has no settings.json. Give that of a run"),
        ("export nope m.safetensors", "nope: no such folder. Give that of a run that was trained with --save-every"),
        ("sweep --resume nope", "--resume nope: no such folder. A sweep is resumed from the folder that it began in"),
        ("plan --network nope.toml", "--network nope.toml: cannot be read (No such file or directory). Give a network"),
        ("simulate --strategy AllReduce() --network no", "--network no: cannot be read (No such file or directory). "),
        ("plan --doctor no", "--doctor no: cannot be read (No such file or directory). Write it with thinwire doctor"),
        ("topology Ring --out file/x.png", "file/x.png: cannot be written (Not a directory). Use a folder"),
        ("doctor --out file/x.json", "--out file/x.json: cannot be written (Not a directory). Name a file in a folder"),
        ("doctor --workers 2 --out .", "--out .: cannot be written (Is a directory). Name a file in a folder"),
    ],
)
def test_a_path_that_does_not_serve_is_refused_with_its_option_and_the_reason_once(
    call: str, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured before the path was checked")

    monkeypatch.setattr(examination, "examine", measured)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    error = refused(capsys, *call.split())
    assert error.startswith(words) and "Errno" not in error


@pytest.mark.parametrize(
    ("saved_every", "words"),
    [
        (None, "run: this run was not saved. Train with --save-every N"),
        (50, "run: this run has saved nothing yet (--save-every 50). Wait for it, or train again"),
    ],
)
def test_a_run_that_was_not_saved_is_told_how_to_save_it(
    saved_every: int | None,
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings(task="digits", model="mlp", strategy="AllReduce()", steps=5, save_every=saved_every)
    RunFolder(Path("run")).create()
    RunFolder(Path("run")).write_settings(settings)
    assert refused(capsys, "export", "run", "m.safetensors") == words
    assert refused(capsys, "train", "--resume", "run") == f"--resume {words}"


def test_what_the_doctor_has_measured_is_printed_also_where_its_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(examination, "examine", lambda *_, **__: Examination(1, "", {}, [], {}, {}))
    monkeypatch.setattr("thinwire.cli.doctor.write_atomically", full)
    assert main(["doctor", "--task", "digits", "--out", str(tmp_path / "new" / "doctor.json")]) == 2
    printed = capsys.readouterr()
    assert "no training step was timed" in printed.out
    assert "doctor.json: cannot be written (No space left on device)" in printed.err


def test_explain_suggests_only_what_it_explains(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean LocalSGD, Local or " in refused(capsys, "explain", "LocalSDG")
    assert "post-local-sgd" not in refused(capsys, "explain", "LocalSDG")
    assert "did you mean rank" in refused(capsys, "explain", "ddp+powersgd(rnk=4)")
    assert "torch's own method" in refused(capsys, "explain", "post_local_sgd")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("AllReduce --parameters 9 --data here", "--data here with --parameters 9: no task is loaded. Give one"),
        ("AllReduce --parameters 9 --model my:net", "--model my:net with --parameters 9: no task is loaded."),
        ("AllReduce --step-seconds 1", "--prices and --step-seconds are for --bucket"),
    ],
)
def test_explain_refuses_options_that_would_decide_nothing(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "explain", *options.split()).startswith(words)


def test_the_package_is_run_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "train", "--workers", "x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "thinwire: --workers x: must be a whole number, such as 4\n")
