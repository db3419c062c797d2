# SPDX-License-Identifier: Apache-2.0
"""Captured steps without a GPU: what surrounds the graph, and an optimizer that never reads its device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinwire.arrays import fusion
from thinwire.arrays.fusion import Each, autotune, capture, fuse
from thinwire.arrays.fusion.batch import Batch
from thinwire.arrays.fusion.optimizers import base, parameter_batch
from thinwire.arrays.fusion.recording import RECORDER
from thinwire.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fresh_autotune_cache")
RATES = [1e-3, 3e-3, 1e-2]
OPTIMIZERS: dict[str, Callable[[Any], fusion.FusedOptimizer]] = {
    "SGD": lambda ps: fusion.SGD(ps, lr=RATES, momentum=[0.0, 0.9, 0.9], nesterov=[False, False, True]),
    "Adam": lambda ps: fusion.Adam(ps, lr=RATES, weight_decay=[0.0, 0.1, 0.0]),
    "AMSGrad": lambda ps: fusion.Adam(ps, lr=RATES, amsgrad=True),
    "AdamW": lambda ps: fusion.AdamW(ps, lr=RATES),
    "Adagrad": lambda ps: fusion.Adagrad(ps, lr=RATES, initial_accumulator_value=0.1),
    "RMSprop": lambda ps: fusion.RMSprop(ps, lr=RATES, momentum=0.5, centered=True),
    "Adadelta": lambda ps: fusion.Adadelta(ps, lr=RATES),
    "LAMB": lambda ps: fusion.LAMB(ps, lr=RATES, weight_decay=0.1),
}


def network() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
    ).double()


def array_of() -> fusion.FusedArray:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fuse([network() for _ in RATES], seeds=[3, 4, 5])


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(5, 1, 6, 6, generator=drawn, dtype=torch.float64), torch.arange(5) % 3


def step_of(array: fusion.FusedArray, optimizer: fusion.FusedOptimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        array.zero_grad()
        losses = array.losses(F.cross_entropy, array(x), y)
        losses.sum().backward()
        optimizer.step()
        return losses

    return step


def state_of(array: fusion.FusedArray, optimizer: fusion.FusedOptimizer) -> Any:
    return copy.deepcopy([array.state_dict(), [optimizer.extract(slot) for slot in range(3)], torch.get_rng_state()])


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(found, Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(found, dict):
        assert found.keys() == wanted.keys()
        for name in found:
            assert_same(found[name], wanted[name])
    elif isinstance(found, list | tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
    else:
        assert found == wanted


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_warm_up_steps_change_nothing(kind: str, begun: bool) -> None:
    array = array_of()
    optimizer = OPTIMIZERS[kind](array.parameters())
    step = step_of(array, optimizer)
    if begun:
        step(*batch(0))
    before = state_of(array, optimizer)
    with capture._undone(array) as used:
        for number in range(2):
            step(*batch(number))
    assert used == [optimizer]
    assert_same(state_of(array, optimizer), before)
    other = array_of()
    optimizer_2 = OPTIMIZERS[kind](other.parameters())
    if begun:
        step_of(other, optimizer_2)(*batch(0))
    for number in range(2):
        assert torch.equal(step(*batch(number)), step_of(other, optimizer_2)(*batch(number)))
    assert_same(state_of(array, optimizer), state_of(other, optimizer_2))


def test_warm_up_steps_leave_loss_scales() -> None:
    array, scaler = array_of(), fusion.GradScaler(3, init_scale=8.0, growth_interval=1)
    optimizer = OPTIMIZERS["Adam"](array.parameters())
    with capture._undone(array) as used:
        losses = array.losses(F.cross_entropy, array(batch(0)[0]), batch(0)[1])
        scaler.scale(losses).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.scales.tolist() == [16.0] * 3
    assert used == [scaler, optimizer] and scaler.scales.tolist() == [8.0] * 3


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_does_not_read_its_device_updates_alike(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = array_of(), array_of()
    mine, wanted = (OPTIMIZERS[kind](each.parameters()) for each in (ours, theirs))
    for number in range(5):
        for optimizer in (mine, wanted):
            optimizer.param_groups[0]["lr"][0] = 0.01 * (number + 1)
            optimizer.active[2] = number < 3
        step_of(theirs, wanted)(*batch(number))
        with monkeypatch.context() as patch:
            # Each tensor counts as one on a GPU.
            for module in (base, parameter_batch):
                patch.setattr(module, "on_host", lambda _: False)
            token = RECORDER.set(lambda _: None) if number % 2 else None
            step_of(ours, mine)(*batch(number))
            if token is not None:
                RECORDER.reset(token)
    for name, tensor in ours.state_dict().items():
        wanted_tensor = theirs.state_dict()[name]
        assert torch.allclose(tensor.double(), wanted_tensor.double(), rtol=1e-9, atol=1e-12), name
    assert mine.state_dict()["state"].keys() == wanted.state_dict()["state"].keys()


def test_a_captured_step_on_a_cpu_is_the_step() -> None:
    array, other = array_of(), array_of()
    optimizer, alone = (OPTIMIZERS["AdamW"](each.parameters()) for each in (array, other))
    replay = array.capture(step_of(array, optimizer), *batch(0))
    for number in range(3):
        losses = replay(*batch(number))
        assert not losses.requires_grad
        assert torch.equal(losses, step_of(other, alone)(*batch(number)).detach())
    assert_same(state_of(array, optimizer), state_of(other, alone))


def test_other_inputs_than_the_example_are_refused() -> None:
    array = array_of()
    optimizer = OPTIMIZERS["SGD"](array.parameters())
    x, y = batch(0)
    replay = array.capture(step_of(array, optimizer), x, y)
    before = array.state_dict()["0.weight"].clone()
    with pytest.raises(ConfigError, match=r"input 0 is float64\[4, 1, 6, 6\].*takes float64\[5, 1, 6, 6\].*drop_last"):
        replay(x[:4], y[:4])
    with pytest.raises(ConfigError, match=r"input 1 is int32\[5\].*int64\[5\]"):
        replay(x, y.int())
    with pytest.raises(ConfigError, match=r"input 0 is Each of float64\[3, 5, 1, 6, 6\]"):
        replay(Each(x.expand(3, *x.shape)), y)
    with pytest.raises(ConfigError, match="another structure"):
        replay(x)
    assert torch.equal(before, array.state_dict()["0.weight"])
    with pytest.raises(ConfigError, match=r"returned 1\.5: it must return tensors"):
        array.capture(lambda: 1.5)()


def test_steps_that_a_graph_could_not_repeat_are_refused() -> None:
    array = array_of()
    optimizer, other = OPTIMIZERS["SGD"](array.parameters()), torch.optim.SGD(array.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"uses torch\.optim\.SGD.*thinwire\.fusion"), capture._undone(array):
        other.step()
    schedules = fusion.Schedules(optimizer, lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.5))

    with pytest.raises(ConfigError, match=r"calls schedules\.step.*between replays"), capture._undone(array):
        schedules.step()
    with pytest.raises(ConfigError, match=r"changes lr.*between replays"), capture._undone(array):
        step_of(array, optimizer)(*batch(0))
        optimizer.param_groups[0]["lr"][1] = 0.5
    assert optimizer.param_groups[0]["lr"].tolist() == RATES


def test_what_replaces_tensors_is_counted() -> None:
    array = array_of()
    optimizer = OPTIMIZERS["Adam"](array.parameters())
    step_of(array, optimizer)(*batch(0))
    held = capture.CapturedStep(array, step_of(array, optimizer), batch(0))
    held._used, held._shared = [optimizer], []
    held._changes, held._state = held._count_changes(), held._layout()
    assert not held._is_stale()
    array.eval()
    assert held._is_stale()
    array.train()
    assert not held._is_stale()  # everything is as when it was captured
    for change in (
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda: array.set_dropout_rates("3.p", [0.1, 0.2, 0.3]),
        lambda: optimizer.select(array.select([0, 2])),
    ):
        held._changes, held._state = held._count_changes(), held._layout()
        change()
        assert held._is_stale()


class Recorded:
    """A graph that repeats the Python of the step it has recorded, instead of its kernels."""

    made: list[Recorded] = []  # noqa: RUF012

    owner: capture.CapturedStep

    def __init__(self) -> None:
        self.made.append(self)
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generators.append(generator)

    def replay(self) -> None:
        results = self.owner._run()
        self.owner._results.copy_(results)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    """Captures work on the CPU."""
    Recorded.made = []

    @contextmanager
    def record(graph: Recorded, **_: Any) -> Iterator[None]:
        # Recording runs nothing: what its Python does is undone.
        with capture._undone(graph.owner._array):
            yield

    nothing = SimpleNamespace(wait_stream=lambda _: None)
    for name, fake in {
        "CUDAGraph": Recorded,
        "graph": record,
        "Stream": lambda: nothing,
        "current_stream": lambda: nothing,
        "stream": lambda _: nullcontext(),
        "device": lambda _: nullcontext(),
        "set_stream": lambda _: None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(capture, "_on_gpu", lambda device: True)
    recorded = capture.CapturedStep._recorded

    def owned(self: Any, graph: Any, stream: Any) -> Any:
        graph.owner = self
        return recorded(self, graph, stream)

    monkeypatch.setattr(capture.CapturedStep, "_recorded", owned)
    return Recorded


def test_a_replay_takes_rates_schedules_and_active_slots_of_the_moment(graphs: type[Recorded]) -> None:
    array, other = array_of(), array_of()
    pairs = [(each, OPTIMIZERS["AdamW"](each.parameters())) for each in (array, other)]
    steps = [step_of(*pair) for pair in pairs]
    factory = lambda one: torch.optim.lr_scheduler.ExponentialLR(one, 0.9)  # noqa: E731
    schedules = [fusion.Schedules(optimizer, factory) for _, optimizer in pairs]
    replay = array.capture(steps[0], *batch(0))
    assert graphs.made[0].generators == array.generators
    assert_same(state_of(*pairs[0]), state_of(*pairs[1]))
    for number in range(6):
        if number == 2:
            for _, optimizer in pairs:
                optimizer.active[1] = False
        if number == 4:
            for each, optimizer in pairs:
                optimizer.select(each.select([0, 2, 2]))
            for each in schedules:
                each.select(fusion.Selection((0, 2, 2), 3, {}, {}))
        assert torch.equal(replay(*batch(number)), steps[1](*batch(number)).detach())
        for each in schedules:
            each.step()
    assert len(graphs.made) == 2  # after `select`
    assert_same(state_of(*pairs[0]), state_of(*pairs[1]))


@pytest.mark.usefixtures("graphs")
def test_a_step_that_keeps_its_gradients_is_refused_and_leaves_them() -> None:
    array = array_of()
    (x, y), weight = batch(0), next(array.parameters())
    array.losses(F.cross_entropy, array(x), y).sum().backward()
    gradient = weight.grad

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses = array.losses(F.cross_entropy, array(x), y)
        losses.sum().backward()
        return losses

    with pytest.raises(ConfigError, match=r"does not clear the gradients.*array\.zero_grad\(\)"):
        array.capture(step, x, y)
    assert weight.grad is gradient


@pytest.mark.usefixtures("graphs")
def test_a_step_that_waits_for_the_gpu_is_refused_before_the_capture() -> None:
    array = array_of()
    optimizer = OPTIMIZERS["Adam"](array.parameters())
    before, calls = state_of(array, optimizer), list[int]()

    def step(x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 4:  # where torch would notice it
            raise RuntimeError("called a synchronizing CUDA operation")
        return step_of(array, optimizer)(x, y)

    with pytest.raises(ConfigError, match=r"waits for the GPU: called a synchronizing CUDA operation\. .*\.item\(\)"):
        array.capture(step, *batch(0))
    assert_same(state_of(array, optimizer), before)


def test_a_candidate_that_fails_is_not_chosen() -> None:
    x = torch.ones(3, requires_grad=True)

    def fails(value: Batch) -> Batch:
        raise RuntimeError("grad_weight must be contiguous")

    candidates: Any = {"works": lambda value: Batch(2 * value.tensor, 0), "fails": fails}
    with autotune.measuring():
        found = autotune.run_fastest("doubling", candidates, [Batch(x, 0)])
        assert found.tensor.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match="grad_weight"):
            autotune.run_fastest("failing", {"fails": fails, "too": fails}, [Batch(x, 0)])


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_row_kernels_take_channels_last_weights_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays: list[fusion.FusedArray] = []
    for as_on_gpu in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models = [nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last) for _ in RATES]
        array = fuse(models)
        optimizer, counted = OPTIMIZERS[kind](array.parameters()), Mock()
        assert not next(array.parameters()).is_contiguous()
        with monkeypatch.context() as patch:
            if as_on_gpu:
                for module in (base, parameter_batch):
                    patch.setattr(module, "on_host", lambda _: False)
                patch.setattr(parameter_batch, "on_gpu", lambda _: True)
                counted = Mock(wraps=optimizer.update_rows_)
                patch.setattr(optimizer, "update_rows_", counted)
            for number in range(3):
                array.zero_grad()
                array(batch(number)[0].expand(5, 3, 6, 6)).square().mean((1, 2, 3, 4)).sum().backward()
                optimizer.step()
        assert counted.call_count == 3 * as_on_gpu
        arrays.append(array)
    for name, tensor in arrays[0].state_dict().items():
        assert torch.allclose(tensor, arrays[1].state_dict()[name], rtol=1e-9)
