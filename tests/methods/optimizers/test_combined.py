# SPDX-License-Identifier: Apache-2.0
"""Several optimizers under one attach: each moves its own parameters, and one checkpoint holds them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire
from thinwire import AllReduce, CombinedOptimizer, Comm, ConfigError, DiLoCo, OuterOptimizer, SlowMo, Strategy
from thinwire.methods.optimizers.adaptive import divides_by_size

STEPS = 11
DILOCO = DiLoCo(period=4, fragments=2, delay=1, mixing=0.5, outer=OuterOptimizer("SGD", lr=0.8, momentum=0.5))


def model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=draw))
    return layers


def parts(layers: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = [p for p in layers.parameters() if p.dim() == 2]
    others = [p for p in layers.parameters() if p.dim() != 2]
    return torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.01)


def go_on(layers: nn.Module, optimizers: Any, rank: int, steps: range) -> Tensor:
    for step in steps:
        draw = torch.Generator().manual_seed(100 * rank + step)
        x, y = torch.randn(8, 4, generator=draw), torch.randn(8, 2, generator=draw)
        for each in optimizers:
            each.zero_grad()
        (layers(x) - y).square().mean().backward()
        for each in optimizers:
            each.step()
    return torch.cat([p.detach().flatten() for p in layers.parameters()])


def test_one_worker_moves_as_under_the_optimizers_by_themselves() -> None:
    apart, together = model(), model()
    found = go_on(together, [CombinedOptimizer(*parts(together))], 0, range(STEPS))
    assert torch.equal(found, go_on(apart, parts(apart), 0, range(STEPS)))


@pytest.mark.parametrize("strategy", [DILOCO, AllReduce(), SlowMo(period=3, buffers="average")], ids=str)
def test_a_run_goes_on_from_its_one_checkpoint_bit_for_bit(strategy: Strategy, tmp_path: Path) -> None:
    def body(comm: Comm) -> tuple[Tensor, Tensor, list[float]]:
        def begin() -> thinwire.Worker:
            layers = model()
            return thinwire.attach(layers, CombinedOptimizer(*parts(layers)), strategy, comm=comm)

        whole = begin()
        go_on(whole.model, [whole.optimizer], comm.rank, range(6))
        whole.optimizer.param_groups[0]["lr"] = 0.04
        whole.save(tmp_path)
        ends = go_on(whole.model, [whole.optimizer], comm.rank, range(6, STEPS))
        again = begin()
        again.load(tmp_path)
        inner: Any = again.optimizer
        rates = [group["lr"] for each in inner.optimizers for group in each.param_groups]
        return ends, go_on(again.model, [again.optimizer], comm.rank, range(6, STEPS)), rates

    for whole, again, rates in thinwire.run_threads(2, body):
        assert torch.equal(whole, again)
        assert rates == [0.04, 0.01]


def test_diloco_with_muon_is_that_of_its_workers_by_themselves() -> None:
    strategy = DiLoCo(period=4, outer=OuterOptimizer("SGD", lr=0.8))

    def body(comm: Comm) -> Tensor:
        layers = model()
        optimizer = CombinedOptimizer(*parts(layers))
        thinwire.attach(layers, optimizer, strategy, comm=comm)
        return go_on(layers, [optimizer], comm.rank, range(4))

    start = torch.cat([p.detach().flatten() for p in model().parameters()])
    apart = [model() for _ in range(2)]
    ends = [go_on(layers, parts(layers), rank, range(4)) for rank, layers in enumerate(apart)]
    expected = start - 0.8 * (start - (ends[0] + ends[1]) / 2)
    for found in thinwire.run_threads(2, body):
        torch.testing.assert_close(found, expected)


def test_a_scheduler_and_a_closure_reach_every_optimizer() -> None:
    layers = model()
    muon, adamw = parts(layers)
    optimizer = CombinedOptimizer(muon, adamw)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        loss = layers(torch.ones(1, 4)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    scheduler.step()
    assert calls == [1]
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.025, 0.005)
    assert divides_by_size(optimizer)


def test_parameters_of_two_optimizers_and_single_ones_are_refused() -> None:
    layers = model()
    muon, adamw = parts(layers)
    with pytest.raises(ConfigError, match="1 optimizers: must be two or more"):
        CombinedOptimizer(muon)
    with pytest.raises(ConfigError, match="2 parameters are in two optimizers"):
        CombinedOptimizer(muon, torch.optim.SGD(layers.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="LBFGS: it cannot be combined"):
        CombinedOptimizer(adamw, torch.optim.LBFGS(layers.parameters()))
