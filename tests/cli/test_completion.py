# SPDX-License-Identifier: Apache-2.0
"""Completion in a shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.cli import main
from thinwire.cli.commands import COMMANDS


def completed(script: str, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    line = " ".join(f"'{word}'" for word in ("thinwire", *words))
    ask = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _thinwire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_values_files_and_recipes(capsys, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    (tmp_path / "thinwire").write_text(f'#!/bin/sh\nexec {sys.executable} -m thinwire "$@"\n')
    (tmp_path / "thinwire").chmod(0o755)
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, tmp_path, "tr") == ["train"]
    assert set(completed(script, tmp_path, "")) >= set(COMMANDS)
    assert completed(script, tmp_path, "train", "--tar") == ["--target-loss"]
    assert set(completed(script, tmp_path, "train", "--model")) == {"--model-size", "--model"}
    assert completed(script, tmp_path, "train", "--schedule", "") == ["constant", "cosine"]
    assert completed(script, tmp_path, "train", "--config", "ru") == ["run.toml"]
    assert completed(script, tmp_path, "train", "--strategy", "SlowM") == ["SlowMo\\(\\)"]
    assert completed(script, tmp_path, "explain", "SlowM") == ["SlowMo\\(\\)"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_name_every_command(capsys, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS) and "target-loss" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


def test_completion_is_installed_where_the_shell_looks_for_it(capsys, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["--install-completion", "fish"]) == 0
    (written,) = tmp_path.rglob("thinwire.fish")
    assert "complete -c thinwire" in written.read_text() and f"{written}: written" in capsys.readouterr().err
