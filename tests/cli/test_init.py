# SPDX-License-Identifier: Apache-2.0
"""`thinwire init`: the script that it writes trains on two processes, leaves on a signal, and resumes after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.buckets import free_port
from thinwire.cli import main
from thinwire.core.storage.bucket import KEY, new_key


def start(folder: Path, **environment: str) -> list[subprocess.Popen[str]]:
    """Start the script as two workers: as torchrun would, or with another environment."""
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, "train.py"],
            cwd=folder,
            env={
                **os.environ,
                **(environment or {**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)}),
                "THINWIRE_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def ended(workers: list[subprocess.Popen[str]]) -> tuple[list[int], str]:
    """Wait for the workers; their exit codes and the first one's output."""
    outputs = [each.communicate(timeout=90)[0] for each in workers]
    return [each.returncode for each in workers], "".join(outputs)


def newest(folder: Path) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*")), default=0)


def until_saved(folder: Path, workers: list[subprocess.Popen[str]], after: int) -> None:
    """Wait for a checkpoint of a later step."""
    while newest(folder) <= after:
        assert all(each.poll() is None for each in workers), ended(workers)
        time.sleep(0.02)


def written(folder: Path, epochs: int, *options: str) -> Path:
    """Write the script, with more epochs and checkpoints."""
    folder.mkdir()
    path = folder / "train.py"
    assert main(["init", str(path), *options]) == 0
    text = path.read_text().replace("EPOCHS = 4", f"EPOCHS = {epochs}").replace("SAVE_EVERY = 50", "SAVE_EVERY = 10")
    path.write_text(text)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_script_is_killed_and_resumed_and_ends_with_the_same_bits(tmp_path: Path, capsys) -> None:
    whole, stopped = (written(tmp_path / name, 8) for name in ("whole", "stopped"))
    assert "torchrun --standalone --nproc-per-node 2 " in capsys.readouterr().out
    codes, output = ended(start(whole))
    assert codes == [0, 0] and "epoch 8 of 8, step 800: accuracy" in output, output

    workers = start(stopped)
    until_saved(stopped, workers, 0)
    workers[1].send_signal(signal.SIGTERM)  # one of them; both save after the same step
    codes, output = ended(workers)
    assert codes == [75, 75], output
    workers, saved = start(stopped), newest(stopped)
    until_saved(stopped, workers, max(saved, 120))  # in the second epoch
    for each in workers:
        each.kill()
    ended(workers)
    codes, output = ended(start(stopped))
    assert codes == [0, 0] and "epoch 1 of" not in output, output
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (stopped, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_script_trains_over_a_bucket(tmp_path: Path, capsys) -> None:
    pytest.importorskip("obstore")
    url = (tmp_path / "run").as_uri()
    folder = written(tmp_path / "bucket", 1, "--rendezvous", url)
    assert "THINWIRE_KEY=... THINWIRE_RANK=0 python" in capsys.readouterr().out
    codes, output = ended(start(folder, **{KEY: new_key()}))
    assert codes == [0, 0] and "epoch 1 of 1, step 100: accuracy" in output, output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "exists, and is not replaced"),
        (["--strategy", "SlowMoe()"], "did you mean SlowMo"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
        (["--strategy", "Gossip(Hypercube())", "--workers", "3"], "power of two"),
    ],
)
def test_mistakes_are_refused_and_no_file_is_replaced(tmp_path: Path, capsys, options: list[str], words: str) -> None:
    path = tmp_path / "train.py"
    path.write_text("mine")
    assert main(["init", str(path), *options]) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"] and path.read_text() == "mine"
