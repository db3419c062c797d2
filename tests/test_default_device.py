# SPDX-License-Identifier: Apache-2.0
"""After `torch.set_default_device`, models on the CPU train as before: numbers of the host are not on that device.

The meta device stands for a GPU here. What is made there by mistake has no numbers, so it fails where it meets others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import thinwire
from tests.battery.cases import CODECS, STRATEGIES, CodecCase, is_first
from tests.battery.runs import BUCKET_BYTES, Case, Setting, go_on, smallest, with_
from tests.battery.test_codecs import using
from tests.battery.test_strategies import FAULTS
from tests.fusion.test_life import same, whole
from tests.fusion.test_training import X, Y
from tests.oracles.fusion import make
from tests.problems import flat
from thinwire import AllReduce, Comm, fusion
from thinwire.fusion import autotune, checkpoints, fuse

Inside = Callable[[], AbstractContextManager[object]]
META: Inside = partial(torch.device, "meta")


@pytest.fixture(autouse=True)
def the_default_device_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(autotune.DETERMINISTIC, "1")
    # Torch keeps the default device for each thread, but for this name, which threads that overlap leave behind.
    monkeypatch.setattr("torch.utils._device.CURRENT_DEVICE", None, raising=False)
    yield
    assert torch.get_default_device().type == "cpu"


def both(work: Callable[[Inside], Any]) -> tuple[Any, Any]:
    """The same, with the CPU as default device and with another."""
    return work(nullcontext), work(META)


# -- strategies and codecs ---------------------------------------------------------------------------------------------


def trained(setting: Setting, folder: Path, inside: Inside) -> Tensor:
    """All threads' parameters at the end; in the middle other workers take over from a checkpoint."""
    problem = setting.problem
    assert problem.start.device == problem.batches[0].device == torch.device("cpu")  # made here, and then kept

    def body(comm: Comm) -> Tensor:
        first, second = problem.model(), problem.model()
        with inside():
            worker = go_on(attached(first, comm, setting), setting, 4)
            worker.save(folder)
            worker.detach()
            worker = attached(second, comm, setting)
            worker.load(folder)
            go_on(worker, setting)
            with worker.consensus() as model:
                found = flat(model)
            worker.detach()
        return torch.stack([found, flat(second)])

    return torch.stack(thinwire.run_threads(setting.size, body, timeout=20))


def attached(model: nn.Module, comm: Comm, setting: Setting) -> thinwire.Worker:
    optimizer = setting.make_optimizer(model)
    return thinwire.attach(model, optimizer, setting.case.strategy, comm=comm, bucket_bytes=BUCKET_BYTES)


def trains_alike(each: Case, size: int, folder: Path) -> None:
    setting = with_(each, size=size, dtype=torch.float32, steps=7)
    expected, found = both(lambda inside: trained(setting, folder / str(inside is META), inside))
    assert found.isfinite().all()
    assert torch.equal(expected, found) or not each.reproducible


@pytest.mark.parametrize("each", STRATEGIES, ids=str)
def test_every_strategy_trains_and_resumes_alike(each: Case, tmp_path: Path) -> None:
    trains_alike(each, smallest(each), tmp_path)


@pytest.mark.parametrize("each", CODECS, ids=str)
def test_every_codec_trains_and_resumes_alike(each: CodecCase, tmp_path: Path) -> None:
    trains_alike(using(each.codec, AllReduce), 2, tmp_path)
