# SPDX-License-Identifier: Apache-2.0
"""Every strategy trains on a GPU as on the CPU, sends nothing from the CPU, and checkpoints move between both.

The GPU is a pretended one where there is none; tests/gpu has those that need a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from tests.battery.cases import CODECS, STRATEGIES, CodecCase, is_first
from tests.battery.runs import Case, Setting, begin, smallest, with_
from tests.pretend_gpu import GPU, as_over_nccl, pretend_gpu
from tests.problems import Regression, flat
from thinwire import (
    AllReduce,
    BackupWorkers,
    Comm,
    CompressedMomentum,
    DiLoCo,
    ParameterServer,
    PushSum,
    Worker,
)
from thinwire.core.kernels import all_finite
from thinwire.worker import buckets
from thinwire.worker.worker import internals_of

MAKE_MODEL = Regression.model
# With code of their own for a GPU, or state that moves; and a plain form of gradients, of messages and of momentum.
ASKED = (BackupWorkers, DiLoCo, ParameterServer, AllReduce, PushSum, CompressedMomentum)


def is_asked(each: Case) -> bool:
    return is_first(each) and isinstance(each.strategy, ASKED)


CASES = [pytest.param(each, id=str(each), marks=() if is_asked(each) else pytest.mark.slow) for each in STRATEGIES]


def trained(worker: Worker, setting: Setting, last: int, device: str) -> Worker:
    while worker.step < last:
        step = worker.step
        for group in worker.optimizer.param_groups:
            group["lr"] = setting.plain_rates[step]
        worker.optimizer.zero_grad()
        x, y = (each[step, worker.comm.rank].to(device) for each in setting.problem.batches)
        loss = (worker.model(x) - y).square().mean()
        loss.backward()
        worker.record_batch(loss=loss.detach())
        worker.optimizer.step()
        if setting.case.lockstep:
            internals_of(worker).wait_pending()
    return worker


def run(setting: Setting, device: str, monkeypatch: pytest.MonkeyPatch, work: Callable[[Comm], Any]) -> list[Any]:
    monkeypatch.setattr(Regression, "model", lambda self: MAKE_MODEL(self).to(device))
    if device == "cpu":
        return thinwire.run_threads(setting.size, work, timeout=20)
    with pretend_gpu():
        return thinwire.run_threads(setting.size, lambda comm: work(as_over_nccl(comm)), timeout=20)


@pytest.mark.parametrize("each", CASES)
def test_a_strategy_trains_as_on_the_cpu_and_goes_on_there(
    each: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    setting = with_(each, size=max(2, smallest(each)), dtype=torch.float32)
    half, steps = setting.steps // 2, setting.steps

    def whole(comm: Comm, device: str) -> torch.Tensor:
        worker = trained(begin(comm, setting), setting, half, device)
        worker.save(tmp_path / device)
        return flat(trained(worker, setting, steps, device).model).cpu()

    def rest(comm: Comm, device: str, other: str) -> torch.Tensor:
        worker = begin(comm, setting, elsewhere=True)
        worker.load(tmp_path / other)
        return flat(trained(worker, setting, steps, device).model).cpu()

    ends = [run(setting, device, monkeypatch, lambda comm, d=device: whole(comm, d)) for device in ("cpu", "cuda:0")]
    ends += [
        run(setting, device, monkeypatch, lambda comm, d=device, o=other: rest(comm, d, o))
        for device, other in (("cpu", "cuda:0"), ("cuda:0", "cpu"))
    ]
    if each.reproducible:
        for end in ends[1:]:
            for found, wanted in zip(end, ends[0], strict=True):
                assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("each", CODECS, ids=str)
def test_a_codec_s_bytes_are_the_cpu_s(each: CodecCase) -> None:
    with pretend_gpu():
        for n in (320, 37):
            x = torch.randn(n, generator=torch.Generator().manual_seed(n))
            here, there = x.clone(), x.to("cuda:0")
            codes = [each.codec.encode(vector, {}, key=3) for vector in (here, there)]
            assert codes[1].is_cuda
            assert torch.equal(codes[0], codes[1].cpu())
            decoded = each.codec.decode(codes[1], there, key=3)
            assert decoded.is_cuda
            assert torch.equal(each.codec.decode(codes[0], here, key=3), decoded.cpu())


def test_gradients_that_are_not_finite_are_found_in_one_look_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def looked(x: torch.Tensor) -> bool:
        looks.append(x.numel())
        return all_finite(x)

    def work(comm: Comm) -> str:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.Linear(40, 4), torch.nn.Linear(4, 1)).to("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, thinwire.AllReduce(), comm=as_over_nccl(comm), bucket_bytes=40)
        assert internals_of(worker).backward is not None
        assert len(internals_of(worker).backward.buckets) > 2
        x = torch.ones(2, 4, device=GPU)
        model(x).sum().backward()
        optimizer.step()
        assert not looks, "at single buckets, each of which waits for the GPU"
        comm.all_reduce_(torch.zeros(1, device=GPU)).wait()
        optimizer.zero_grad()
        loss = model(x).sum()
        if comm.rank == 1:
            loss = loss + (model[1].weight * float("nan")).sum()
        try:
            loss.backward()
            optimizer.step()
        except thinwire.NonFiniteError as error:
            return str(error)
        return ""

    monkeypatch.setattr(buckets, "all_finite", looked)
    with pretend_gpu():
        errors = thinwire.run_threads(2, work, timeout=20)
    assert all("gradient of 1.weight on rank 1" in error for error in errors), errors


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_parameter_without_elements_trains(set_to_none: bool) -> None:
    def work(comm: Comm, device: str) -> list[list[float]]:
        model = torch.nn.ParameterList([torch.ones(3), torch.empty(0), torch.ones(2)]).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        thinwire.attach(model, optimizer, thinwire.AllReduce(), comm=as_over_nccl(comm) if device != "cpu" else comm)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            sum((comm.rank + p).square().sum() for p in model).backward()
            optimizer.step()
        return [p.tolist() for p in model]

    with pretend_gpu():
        found = thinwire.run_threads(2, lambda comm: work(comm, "cuda:0"), timeout=20)
    assert found == thinwire.run_threads(2, lambda comm: work(comm, "cpu"), timeout=20)
