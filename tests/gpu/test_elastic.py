# SPDX-License-Identifier: Apache-2.0
"""Elastic processes that share one GPU: one is killed, the others continue, and another one joins.

Prints how long the survivors' next step took. `DEVICE=cpu python -m pytest tests/gpu/test_elastic.py` needs no GPU.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

import thinwire
from tests.elastic.processes import Processes
from tests.elastic.test_kills import finished
from thinwire.elastic.threads import ThreadNetwork

DEVICE = os.environ.get("DEVICE", "cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="torch sees no GPU"),
]
WIDTHS = (64, 1024, 1024, 4)  # 4.5 MB of parameters, in several buckets


@pytest.mark.parametrize("recipe", ["AllReduce(codec=ErrorFeedback(OneBit()))", "DiLoCo(period=4)"])
def test_of_three_workers_on_one_gpu_one_is_killed_and_another_joins(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    processes = Processes(recipe, 3, steps=20, widths=WIDTHS, seconds=0.01, device=DEVICE, last_view=2)
    processes.until(0, 5)
    killed = processes.kill(0)
    processes.until_view(1, 1)
    processes.start(0)
    reports = processes.finish()[1:]
    finished(reports, 3)
    # From the kill, or from the last step that needed no message of the lost worker, to the next step without it.
    pauses: list[float] = []
    for report in reports[:2]:
        changed = next(at for at, epoch, _ in report.views if epoch == 1)
        last = max((at for at, _ in report.steps if killed < at < changed), default=killed)
        pauses.append(next(at for at, _ in report.steps if at > changed) - last)
    with capsys.disabled():
        sys.stdout.write(f"\n{recipe} on {DEVICE}: the survivors' next step ended after {max(pauses):.2f} s\n")


@pytest.mark.skipif(DEVICE == "cpu", reason="asks the GPU's allocator")
def test_an_elastic_round_needs_no_more_memory_of_the_gpu() -> None:
    def peak(**settings: Any) -> int:
        before = torch.cuda.memory_allocated(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
        model = torch.nn.Linear(2048, 2048, device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        worker = thinwire.attach(model, optimizer, "DiLoCo(period=2)", **settings)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(4, 2048, device=DEVICE)).square().mean().backward()
            optimizer.step()
        found = torch.cuda.max_memory_allocated(DEVICE) - before
        worker.detach()
        return found

    torch.cuda.init()  # its memory can be asked for only then
    plain = peak()
    assert peak(elastic=ThreadNetwork().fleet("w0", 0, 1)) <= plain + (1 << 20)
