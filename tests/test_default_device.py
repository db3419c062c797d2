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


# Other forms of a class where there is time.
FORMS = [pytest.param(each, id=str(each), marks=[] if is_first(each) else [pytest.mark.slow]) for each in STRATEGIES]


@pytest.mark.parametrize("each", FORMS)
def test_every_strategy_trains_and_resumes_alike(each: Case, tmp_path: Path) -> None:
    trains_alike(each, smallest(each), tmp_path)


@pytest.mark.parametrize("each", CODECS, ids=str)
def test_every_codec_trains_and_resumes_alike(each: CodecCase, tmp_path: Path) -> None:
    trains_alike(using(each.codec, AllReduce), 2, tmp_path)


# -- arrays of models --------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": [0.9, 0.5, 0.0], "nesterov": [True, False, False]},
    "Adam": {"amsgrad": True},
    "AdamW": {"betas": ([0.9, 0.8, 0.7], 0.99)},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"lr_decay": [0.0, 0.1, 0.2]},
    "Adadelta": {"rho": [0.9, 0.8, 0.7]},
    "LAMB": {},
}
SCHEDULES: list[Any] = [
    partial(lr_scheduler.StepLR, step_size=2, gamma=0.7),
    partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=40, cycle_momentum=False),
    partial(lr_scheduler.ReduceLROnPlateau, patience=0),
]


class Net(nn.Module):
    """With what draws, what has buffers, and what scales."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.alpha = nn.Dropout(rate), nn.AlphaDropout(rate / 2)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.alpha(self.drop(torch.tanh(self.norm(self.first(x))))))


class Array:
    """Three models, and all that trains them."""

    def __init__(self, models: list[nn.Module], name: str, rows: bool) -> None:
        self.array = fuse(models, seeds=range(3))
        self.optimizer = getattr(fusion, name)(self.array.parameters(), lr=[0.05, 0.01, 0.003], **OPTIMIZERS[name])
        if not rows:
            self.optimizer.row_kernel = False
        self.schedules = fusion.Schedules(self.optimizer, SCHEDULES)
        self.scaler = fusion.GradScaler(3, 8.0, growth_interval=2)

    @property
    def parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "schedules": self.schedules, "scaler": self.scaler}

    def train(self, steps: range, *, spoil: int | None = None) -> None:
        soft = X[0][:, :3].softmax(1)
        for step in steps:
            self.array.zero_grad()
            outputs = self.array(X[step])
            losses = self.array.losses(F.cross_entropy, outputs, Y[step])
            losses = losses + self.array.losses(F.cross_entropy, outputs, soft)
            self.scaler.scale(losses).sum().backward()
            if spoil is not None:
                next(iter(self.array.parameters())).grad[spoil] = torch.inf
            self.scaler.unscale_(self.optimizer)
            fusion.clip_grad_norm_(self.array.parameters(), [0.5, 1.0, 2.0])
            fusion.clip_grad_value_(self.array.parameters(), 0.4)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedules.step(losses)

    def everything(self) -> list[Any]:
        slots = [whole(self.array, self.optimizer, index) for index in range(self.array.size)]
        return [{name: x for name, x in slot.items() if x is not None} for slot in slots]


def lived(name: str, rows: bool, folder: Path, inside: Inside) -> tuple[list[Any], str]:
    """Train, overflow, replace and copy models, and go on from a checkpoint."""
    models, others = make(partial(Net, 0.3)), make(partial(Net, 0.1))
    with inside():
        run = Array(models, name, rows)
        run.train(range(3))
        run.train(range(3, 4), spoil=1)
        run.optimizer.active[0] = False
        run.train(range(4, 6))
        kept = run.array.select([2, 1, 1])
        for follower in run.parts.values():
            follower.select(kept)
        run.optimizer.insert(0, run.optimizer.extract(2))
        run.array.insert(1, others[1], seed=77)
        run.optimizer.reset(1, lr=0.02)
        run.schedules.insert(1, SCHEDULES[1])
        run.scaler.insert(1)
        run.train(range(6, 8))
        checkpoints.save(folder, run.array, **run.parts)
        again = Array(others, name, rows)
        for place, each in enumerate((2, 1, 1)):
            again.schedules.insert(place, SCHEDULES[each])
        checkpoints.load(folder, again.array, **again.parts)
        again.train(range(8, 10))
        norms = fusion.gradient_norms(again.array.parameters())
        rest = repr([again.schedules.state_dict(), again.scaler.state_dict(), norms, again.array.dropout_rates()])
    return again.everything(), rest


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "at once"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_array_lives_alike_with_every_optimizer(name: str, rows: bool, tmp_path: Path) -> None:
    (expected, rest), (found, other) = both(lambda inside: lived(name, rows, tmp_path / str(inside is META), inside))
    assert all(same(one, two) for one, two in zip(expected, found, strict=True))
    assert rest == other


def test_every_fused_optimizer_is_tried() -> None:
    assert {kind.__name__ for kind in vars(fusion).values() if is_optimizer(kind)} == OPTIMIZERS.keys()


def is_optimizer(kind: object) -> bool:
    base = fusion.FusedOptimizer
    return isinstance(kind, type) and issubclass(kind, base) and kind is not base
