# SPDX-License-Identifier: Apache-2.0
"""A worker that is killed under torchrun, which ends all others a moment later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
import thinwire

dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
worker = thinwire.attach(model, optimizer, sys.argv[1], timeout=20)
while worker.step < 40:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    if worker.step == 5 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["AllReduce()", "EASGD(period=1)", "BackupWorkers()", "ParameterServer()", "EagerPushSum()"]
)
def test_survivors_name_the_killed_rank_before_torchrun_ends_them(recipe: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        str(script),
        recipe,
    ]
    # torchrun looks every tenth of a second, and may on a busy machine end the others before they notice.
    for _ in range(4):
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0
        if said := [line for line in done.stderr.splitlines() if line.startswith("rank ")]:
            break
    else:
        pytest.fail(done.stderr[-3000:])
    # Backup workers log that they continue without one. Where torchrun has ended rank 0 too, it is lost as well.
    named = ["rank 1 is lost (", "rank 0, rank 1 are lost ("]
    named += ["training continues without rank 1, "] * (recipe == "BackupWorkers()")
    for line in said:
        assert any(words in line for words in named), line
        assert not line.startswith("rank 1")


_RESTARTED = """
import os, sys
from pathlib import Path
import torch
import thinwire

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
worker = thinwire.attach(model, optimizer, "AllReduce()", timeout=30)
if any(Path(sys.argv[1]).rglob("rank-*.json")):
    worker.load(sys.argv[1])
while worker.step < 6:
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if worker.step == 1:
        worker.save(sys.argv[1])
    if attempt < 2 and worker.step == 2 and rank == 1:
        os._exit(3)
print(f"attempt {attempt} rank {rank} is at step {worker.step}", flush=True)
"""


@pytest.mark.slow
def test_workers_that_torchrun_has_restarted_find_each_other_at_the_first_try(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(script), str(tmp_path / "checkpoints")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "attempt 2 rank" in done.stdout
