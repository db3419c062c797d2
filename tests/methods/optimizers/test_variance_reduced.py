# SPDX-License-Identifier: Apache-2.0
"""SAGA and SVRG equal their definitions, resume, and refuse what they cannot use."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn import functional as F

from tests.oracles import coreset_training as oracle
from thinwire.core.storage.tree import pack, unpack
from thinwire.errors import ConfigError
from thinwire.methods.optimizers.saga import Saga
from thinwire.methods.optimizers.svrg import Svrg

N, WIDTH, CLASSES, DECAY = 40, 6, 3, 0.05


@dataclass(frozen=True)
class Softmax:
    """Softmax regression on random points, with a weight for each."""

    x: Tensor
    y: Tensor
    weights: Tensor

    def layer(self) -> nn.Linear:
        layer = nn.Linear(WIDTH, CLASSES).double()
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.zero_()
        return layer

    def loss(self, layer: nn.Module, rows: list[int]) -> Tensor:
        losses = F.cross_entropy(layer(self.x[rows]), self.y[rows], reduction="none")
        return (losses * self.weights[rows]).mean()

    def gradient(self, w: Tensor, i: int) -> Tensor:
        h = torch.cat([self.x[i], torch.ones(1, dtype=torch.float64)])
        residual = (w @ h).softmax(0)
        residual[self.y[i]] -= 1
        return self.weights[i] * residual[:, None] * h


def problem(seed: int = 0, *, weighted: bool = True) -> Softmax:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(N, WIDTH, generator=draw, dtype=torch.float64)
    y = torch.randint(CLASSES, (N,), generator=draw)
    weights = 0.2 + torch.rand(N, generator=draw, dtype=torch.float64)
    return Softmax(x, y, weights / weights.mean() if weighted else torch.ones_like(weights))


def batches_of(steps: int, size: int, seed: int = 1) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randperm(N, generator=draw)[:size].tolist() for _ in range(steps)]


def matrix(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], dim=1)


def train_saga(task: Softmax, batches: list[list[int]], *, lr: float) -> tuple[nn.Linear, Saga]:
    layer = task.layer()
    optimizer = Saga(layer, N, lr=lr, weight_decay=DECAY)
    take_saga_steps(task, layer, optimizer, batches)
    return layer, optimizer


def take_saga_steps(task: Softmax, layer: nn.Linear, optimizer: Saga, batches: list[list[int]]) -> None:
    for rows in batches:
        optimizer.zero_grad()
        task.loss(layer, rows).backward()
        optimizer.step(indices=torch.tensor(rows))


def train_svrg(task: Softmax, rounds: list[list[list[int]]], *, lr: float) -> tuple[nn.Linear, Svrg]:
    layer = task.layer()
    optimizer = Svrg(layer.parameters(), lr, weight_decay=DECAY)
    take_svrg_steps(task, layer, optimizer, rounds)
    return layer, optimizer


def take_svrg_steps(
    task: Softmax, layer: nn.Linear, optimizer: Svrg, rounds: list[list[list[int]]], *, snapshot: bool = True
) -> None:
    for batches in rounds:
        if snapshot:
            optimizer.snapshot(lambda: task.loss(layer, list(range(N))).backward())
        for rows in batches:
            optimizer.step(lambda rows=rows: backward(task, layer, rows))


def backward(task: Softmax, layer: nn.Linear, rows: list[int]) -> float:
    loss = task.loss(layer, rows)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("size", [1, 4])
def test_saga_with_a_table_of_numbers_is_saga_with_a_table_of_gradients(size: int) -> None:
    task, batches = problem(), batches_of(120, size)
    start = torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)
    expected = oracle.saga(task.gradient, start, N, batches, lr=0.1, decay=DECAY)
    layer, _ = train_saga(task, batches, lr=0.1)
    assert torch.allclose(matrix(layer), expected, atol=1e-12)


@pytest.mark.parametrize("size", [1, 4])
def test_svrg_equals_its_oracle(size: int) -> None:
    task = problem()
    rounds = [batches_of(30, size, seed) for seed in range(3)]
    start = torch.zeros(CLASSES, WIDTH + 1, dtype=torch.float64)
    expected = oracle.svrg(task.gradient, start, N, rounds, lr=0.1, decay=DECAY)
    layer, _ = train_svrg(task, rounds, lr=0.1)
    assert torch.allclose(matrix(layer), expected, atol=1e-12)


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """A state, written and read back."""
    tree, tensors = pack(state)
    return unpack(tree, load(io.BytesIO(save(tensors)).getvalue()))


def test_a_resumed_saga_run_is_bitwise_the_run_that_did_not_stop() -> None:
    task, batches = problem(), batches_of(60, 4)
    whole, _ = train_saga(task, batches, lr=0.1)
    half, before = train_saga(task, batches[:30], lr=0.1)
    optimizer = Saga(half, N, lr=0.7)
    optimizer.load_state_dict(kept(before.state_dict()))
    take_saga_steps(task, half, optimizer, batches[30:])
    assert torch.equal(matrix(half), matrix(whole))


def test_a_resumed_svrg_run_is_bitwise_the_run_that_did_not_stop() -> None:
    task, batches = problem(), batches_of(40, 4)
    whole, _ = train_svrg(task, [batches], lr=0.1)
    half, before = train_svrg(task, [batches[:20]], lr=0.1)
    optimizer = Svrg(half.parameters(), 0.7)
    optimizer.load_state_dict(kept(before.state_dict()))
    take_svrg_steps(task, half, optimizer, [batches[20:]], snapshot=False)
    assert torch.equal(matrix(half), matrix(whole))


def test_a_scheduler_drives_both_step_sizes() -> None:
    task = problem()
    layer = task.layer()
    optimizer = Saga(layer, N, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    take_saga_steps(task, layer, optimizer, batches_of(1, 4))
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_svrg_steps_back_from_its_snapshot_when_a_closure_fails() -> None:
    task = problem()
    layer, optimizer = train_svrg(task, [batches_of(5, 4)], lr=0.1)
    before = matrix(layer)

    def fails() -> float:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        optimizer.step(fails)
    assert torch.equal(matrix(layer), before)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (None, "Pass indices="),
        ([0, 1, 2], "each sample needs one index"),
        ([0, 1, 1, 2], "must differ"),
        ([0, 1, 2, N], "must differ and lie in"),
        ([0, 1, 2, -1], "must differ and lie in"),
    ],
)
def test_saga_refuses_numbers_that_cannot_be_those_of_the_batch(indices: list[int] | None, words: str) -> None:
    task = problem()
    layer = task.layer()
    optimizer = Saga(layer, N, lr=0.1)
    task.loss(layer, [0, 1, 2, 3]).backward()
    with pytest.raises(ConfigError, match=words):
        optimizer.step(indices=None if indices is None else torch.tensor(indices))


def test_saga_refuses_a_step_without_a_batch() -> None:
    layer = problem().layer()
    with pytest.raises(ConfigError, match=r"no backward\(\)"):
        Saga(layer, N, lr=0.1).step(indices=torch.tensor([0]))


def test_saga_refuses_a_state_of_other_data() -> None:
    layer = problem().layer()
    state = Saga(layer, N + 1, lr=0.1).state_dict()
    with pytest.raises(ConfigError, match="has 41 samples"):
        Saga(layer, N, lr=0.1).load_state_dict(state)


@pytest.mark.parametrize("settings", [{"n": 0}, {"lr": 0.0}, {"weight_decay": -1.0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    layer = problem().layer()
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Saga(layer, **{"n": N, "lr": 0.1, **settings})
    others = {name: value for name, value in settings.items() if name != "n"}
    if others:
        with pytest.raises(ConfigError, match=next(iter(others))):
            Svrg(layer.parameters(), **{"lr": 0.1, **others})


def test_svrg_refuses_steps_without_closure_or_snapshot() -> None:
    layer = problem().layer()
    optimizer = Svrg(layer.parameters(), 0.1)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step()
    with pytest.raises(ConfigError, match="snapshot"):
        optimizer.step(lambda: 0.0)
