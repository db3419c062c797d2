# SPDX-License-Identifier: Apache-2.0
"""Mistakes in a call: what the one line says that refuses it."""

from __future__ import annotations

import io

import pytest

from thinwire.cli import console, main


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
    assert "usage: thinwire" in capsys.readouterr().out
