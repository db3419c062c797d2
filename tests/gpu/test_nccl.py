# SPDX-License-Identifier: Apache-2.0
"""Training on GPUs over NCCL gives what training on CPUs over Gloo gives, in a stream of the user's own too.

With one GPU there is one rank, which exercises streams and kernels; messages need two.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).parent
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
RANKS = min(2, max(1, GPUS))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(GPUS == 0, reason="torch sees no GPU"),
]
RECIPES = [
    "AllReduce()",
    "AllReduce(codec=ErrorFeedback(OneBit()))",
    "LocalSGD(period=2, codec=Quantize(8))",
    "DiLoCo(period=3)",
    "OverlapLocalSGD(period=2)",
    "PushSum()",
]
MORE = ["SlowMo(period=2)", "DQSGD(rule=FixedBits())", "AllReduce(codec=PowerSGD(2))"]


def trained(folder: Path, device: str, recipe: str, stream: str = "default", ranks: int = RANKS) -> np.ndarray:
    path = folder / f"{device}-{stream}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launcher, str(HERE / "ranks.py"), device, recipe, stream, str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return np.frombuffer(path.read_bytes(), np.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_nccl_trains_as_gloo_does(recipe: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = trained(tmp_path, "cuda", recipe), trained(tmp_path, "cpu", recipe)
    # Codes of a value between two levels may differ by one level where sums differ in the last bit.
    assert np.abs(on_gpu - on_cpu).max() < (2e-2 if "codec" in recipe else 1e-4)


@pytest.mark.parametrize("recipe", [*RECIPES, *MORE])
def test_three_ranks_that_share_a_gpu_train_over_gloo_as_on_cpus(recipe: str, tmp_path: Path) -> None:
    on_gpu, on_cpu = (trained(tmp_path, device, recipe, ranks=3) for device in ("shared", "cpu"))
    assert np.abs(on_gpu - on_cpu).max() < (2e-2 if "codec" in recipe or "DQSGD" in recipe else 1e-4)


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_a_stream_of_the_users_own_changes_nothing(recipe: str, tmp_path: Path) -> None:
    assert np.array_equal(trained(tmp_path, "cuda", recipe), trained(tmp_path, "cuda", recipe, "own"))


@pytest.mark.parametrize(
    ("recipe", "whole"), [("LocalSGD(period=2)", "AllReduce()"), ("SlowMo(period=2)", "SlowMo(AllReduce(), period=2)")]
)
def test_a_model_in_shards_trains_as_a_whole_one(recipe: str, whole: str, tmp_path: Path) -> None:
    # There is one replica, over all ranks: FSDP averages its gradients.
    sharded, expected = trained(tmp_path, "sharded", recipe), trained(tmp_path, "cuda", whole)
    assert np.abs(sharded - expected).max() < 1e-4


def test_messages_are_answered_in_a_stream_of_the_users_own(tmp_path: Path) -> None:
    recipe = "EagerPushSum(staleness=0)"
    on_gpu, on_cpu = (trained(tmp_path, device, recipe, "own", ranks=2) for device in ("shared", "cpu"))
    assert np.abs(on_gpu - on_cpu).max() < 1e-4
