# SPDX-License-Identifier: Apache-2.0
"""Workers that are simulated as models of an array end where workers as threads do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import thinwire
from tests.arrays.fusion.test_life import wide
from tests.engine import batch, net
from thinwire import Comm, ConfigError, DecentLaM, Gossip, LocalSGD, OnePeerExponential, Ring, Strategy
from thinwire.arrays.fusion import SGD, Each, fuse
from thinwire.arrays.fusion.simulation import Mixing, MixingSimulation, Order

WORKERS, STEPS = 16, 7


def loss(output: Tensor, wanted: Tensor) -> Tensor:
    return (output - wanted).square().mean()


def ring(step: int) -> Tensor:
    return torch.from_numpy(Ring().matrix(WORKERS, step))


def one_peer(step: int) -> Tensor:
    return torch.from_numpy(OnePeerExponential().matrix(WORKERS, step))


def every_third(step: int) -> Tensor | None:
    return torch.full((WORKERS, WORKERS), 1 / WORKERS) if (step + 1) % 3 == 0 else None


def as_threads(strategy: Strategy) -> Tensor:
    """The rows of parameters after some steps of real workers, with nothing in flight."""

    def work(comm: Comm) -> Tensor:
        model = net().double()
        own = 0.0 if isinstance(strategy, DecentLaM) else 0.5
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=own)
        thinwire.attach(model, optimizer, strategy, comm=comm)
        for step in range(STEPS):
            x, y = (part.double() for part in batch(comm.rank, step))
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    return torch.stack(thinwire.run_threads(WORKERS, work, timeout=30))


def as_rows(mixing: Mixing, order: Order) -> tuple[MixingSimulation, Tensor]:
    array = fuse([net().double() for _ in range(WORKERS)])
    simulation = MixingSimulation(array, SGD(array.parameters(), lr=0.05, momentum=0.5), mixing, order=order)
    for step in range(STEPS):
        x, y = (
            Each(torch.stack(parts).double()) for parts in zip(*(batch(r, step) for r in range(WORKERS)), strict=True)
        )
        array.zero_grad()
        array.losses(loss, array(x), y).sum().backward()
        simulation.step()
    return simulation, torch.cat([parameter.detach().flatten(1) for parameter in array.parameters()], 1)


@pytest.mark.parametrize(
    ("strategy", "mixing", "order"),
    [
        (Gossip(Ring(), order="while"), ring, "while"),
        (Gossip(Ring(), order="after"), ring, "after"),
        (Gossip(OnePeerExponential(), order="while"), one_peer, "while"),
        (LocalSGD(period=3), every_third, "after"),
        (DecentLaM(Ring(), momentum=0.5), ring, "inside"),
    ],
    ids=["while", "after", "directed", "local", "inside"],
)
@pytest.mark.slow
def test_rows_of_an_array_end_where_threads_do(strategy: Strategy, mixing: Mixing, order: Order) -> None:
    _, rows = as_rows(mixing, order)
    torch.testing.assert_close(rows, as_threads(strategy), rtol=1e-6, atol=1e-6)


def test_workers_without_communication_drift_apart_and_one_mean_brings_them_together() -> None:
    unmixed, _ = as_rows(lambda step: None, "after")
    mixed_once, _ = as_rows(
        lambda step: torch.full((WORKERS, WORKERS), 1 / WORKERS) if step == STEPS - 1 else None, "after"
    )
    assert unmixed.spread() > 1e-3
    assert mixed_once.spread() < 1e-7


@pytest.mark.parametrize(
    ("matrix", "message"), [(torch.eye(3), "16 workers"), (torch.zeros(WORKERS, WORKERS), "add up to 1")]
)
def test_a_matrix_that_is_not_a_mixing_matrix_is_refused(matrix: Tensor, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_rows(lambda step: matrix, "after")


def test_an_unknown_order_is_refused() -> None:
    array = fuse([net(), net()])
    with pytest.raises(ConfigError, match="order='before'"):
        MixingSimulation(array, SGD(array.parameters(), lr=0.1), lambda step: None, order="before")  # pyright: ignore


def test_workers_whose_layers_differ_and_a_rate_that_would_be_divided_by_are_refused() -> None:
    apart = fuse(wide(), loop=["body"])
    with pytest.raises(ConfigError, match=r"body.*only one worker has it"):
        MixingSimulation(apart, SGD(apart.parameters(), lr=0.1), lambda step: None)
    array = fuse([net(), net()])
    simulation = MixingSimulation(
        array, SGD(array.parameters(), lr=[0.1, 0.0]), lambda step: torch.eye(2), order="inside"
    )
    with pytest.raises(ConfigError, match="lr=0 with order='inside'"):
        simulation.step()


def test_a_parameter_that_is_one_number_is_mixed() -> None:
    class Number(torch.nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.tensor(value))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.value

    array = fuse([Number(1.0), Number(3.0)])
    simulation = MixingSimulation(array, SGD(array.parameters(), lr=0.5), lambda step: torch.full((2, 2), 0.5))
    array.losses(torch.mean, array(torch.zeros(1))).sum().backward()
    simulation.step()
    assert [parameter.tolist() for parameter in array.parameters()] == [[2.0, 2.0]]
