# SPDX-License-Identifier: Apache-2.0
"""Selection over ranks that send nothing from the CPU, as with NCCL alone; the GPU is a pretended one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pretend_gpu import as_over_nccl, pretend_gpu
from thinwire import Comm, run_threads
from thinwire.coreset import select
from thinwire.coreset.quality import optimum_gaps, quality, random_subset

POINTS = [torch.randn(24, 5, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
LABELS = [torch.arange(24) % 2, torch.arange(24) % 3 % 2]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.slow
def test_points_of_several_ranks_are_selected_as_over_gloo(device: str) -> None:
    def work(comm: Comm) -> list[int]:
        x, labels = POINTS[comm.rank].to(device), LABELS[comm.rank]
        return select(x, labels=labels, fraction=0.25, comm=as_over_nccl(comm)).indices.tolist()

    def over_gloo(comm: Comm) -> list[int]:
        found = select(POINTS[comm.rank], labels=LABELS[comm.rank], fraction=0.25, comm=comm)
        return found.indices.tolist()

    with pretend_gpu():
        found = run_threads(2, work, timeout=20)
    assert found == run_threads(2, over_gloo, timeout=20)


@pytest.mark.slow
def test_a_selection_on_a_gpu_is_judged_as_on_the_cpu() -> None:
    def judged(device: str) -> list[Any]:
        x, labels = POINTS[0].to(device), LABELS[0].to(device)
        found = select(x, labels=labels, budget=6)
        drawn = random_subset(found, labels=labels, seed=0)
        gaps = optimum_gaps(x, labels, [(found.indices.to(device), found.weights.to(device))])
        return [quality(x, found.indices, found.weights, labels=labels), gaps, [each.tolist() for each in drawn]]

    with pretend_gpu():
        assert judged("cuda:0") == judged("cpu")
