# SPDX-License-Identifier: Apache-2.0
"""Completion in a shell."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.cli.commands import installed
from thinwire.cli.completion import options_by_command


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("thinwire", *words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _thinwire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_values_and_files(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").touch()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "tr") == ["train"]
    assert set(completed(script, "")) == set(installed())
    assert completed(script, "train", "--tar") == ["--target-loss"]
    assert completed(script, "train", "--model") == ["--model-size", "--model"]
    assert completed(script, "train", "--schedule", "") == ["constant", "cosine"]
    assert completed(script, "train", "--config", "ru") == ["run.toml"]
    assert completed(script, "completion", "--h") == ["--help"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_name_every_command_and_option(capsys, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command, options in options_by_command().items():
        assert command in script
        assert all(option.removeprefix("--") in script for option in options)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)
