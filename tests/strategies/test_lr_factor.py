# SPDX-License-Identifier: Apache-2.0
"""The effective learning rate that strategies tell is the one that training has."""

import pytest
import torch
from torch import nn

import thinwire
from thinwire import DiLoCo, LocalSGD, NodeAverage, Offloaded, OuterOptimizer, OverlapLocalSGD, Probe, SlowMo, Streaming
from thinwire.comm.base import Comm
from thinwire.plan import explain

ROUNDS, PERIOD = 60, 4

RECIPES: list[tuple[thinwire.Strategy, float]] = [
    (thinwire.AllReduce(), 1.0),
    (LocalSGD(period=PERIOD), 1.0),
    (SlowMo(period=PERIOD, momentum=0.0), 1.0),
    (SlowMo(period=PERIOD, momentum=0.5), 2.0),
    (SlowMo(period=PERIOD, momentum=0.8, lr=0.7), 3.5),
    (SlowMo(base=LocalSGD(period=2), period=PERIOD, momentum=0.5), 2.0),
    (SlowMo(Probe(LocalSGD(period=2)), period=PERIOD, momentum=0.5), 2.0),
    (Offloaded(SlowMo(period=PERIOD, momentum=0.5)), 2.0),
    (NodeAverage(LocalSGD(period=PERIOD), period=2, node_size=1), 1.0),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.5)), 1.4),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.5, nesterov=True)), 1.4),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.5), delay=2), 0.7),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.5), fragments=2, mixing=0.5), 1.4 / 1.2),
    (DiLoCo(period=PERIOD, outer=OuterOptimizer("SGD", lr=1.0), fragments=2, delay=1, mixing=0.5), 0.875),
    (OverlapLocalSGD(period=PERIOD), 0.4 / 0.58),
    (OverlapLocalSGD(period=PERIOD, compensate=True), 1.0),
    (Streaming(OverlapLocalSGD(period=PERIOD), fragments=2), 0.4 / 0.58),
]


@pytest.mark.parametrize(("strategy", "factor"), RECIPES, ids=str)
def test_where_gradients_stay_alike_parameters_move_by_the_effective_rate(
    strategy: thinwire.Strategy, factor: float
) -> None:
    def moved(comm: Comm) -> torch.Tensor:
        model = nn.ParameterList([torch.zeros(4, dtype=torch.float64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        thinwire.attach(model, optimizer, strategy, comm=comm)
        before = torch.zeros(4, dtype=torch.float64)
        for step in range(ROUNDS * PERIOD):
            if step == (ROUNDS - 10) * PERIOD:
                before = model[0].detach().clone()
            optimizer.zero_grad()
            model[0].sum().backward()
            optimizer.step()
        return before - model[0].detach()

    assert strategy.lr_factor == pytest.approx(factor)
    for x in thinwire.run_threads(2, moved):
        assert (x / (0.5 * 10 * PERIOD)).tolist() == pytest.approx([factor] * 4, rel=1e-3)


@pytest.mark.parametrize(
    "outer", [OuterOptimizer("Adam", lr=0.01), OuterOptimizer("SGD", lr=1.0, momentum=1.5)], ids=str
)
def test_that_of_an_outer_optimizer_other_than_sgd_is_not_known(outer: OuterOptimizer) -> None:
    assert DiLoCo(outer=outer).lr_factor is None
    assert SlowMo().lr_factor == 2.0


def test_explain_tells_it() -> None:
    assert explain(SlowMo(period=4), parameters=1000, workers=2).lr_factor == 2.0
    assert explain(LocalSGD(period=4), parameters=1000, workers=2).lr_factor == 1.0


def test_the_command_prints_it_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    cli = pytest.importorskip("thinwire.cli")
    assert cli.main(["explain", "SlowMo(period=4)", "--parameters", "1000", "--workers", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Learning rate effective 2 times the optimizer's in the long run" in said
    assert "give the optimizer 0.5 times what AllReduce() has" in said
    assert cli.main(["explain", "LocalSGD(period=4)", "--parameters", "1000", "--workers", "2"]) == 0
    assert "Learning rate" not in capsys.readouterr().out
