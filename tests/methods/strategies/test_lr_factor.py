# SPDX-License-Identifier: Apache-2.0
"""The effective learning rate that strategies report is the one that training has."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import thinwire
from tests.grids import one_of_each
from thinwire import (
    EASGD,
    CompressedMomentum,
    OneBitAdam,
    ParameterServer,
    Strategy,
    ZeroOne,
    ZeroOneAdam,
    parse,
)
from thinwire.core.comm.base import Comm
from thinwire.registry import recipe_classes

ROUNDS, PERIOD, LAST = 32, 4, 8

RECIPES: list[tuple[str, float]] = [
    ("AllReduce()", 1.0),
    ("AllReduce(ErrorFeedback(TopK(0.25)))", 1.0),
    ("DQSGD(FixedBits(8))", 1.0),
    ("CompressedMomentum(warmup_steps=100)", 1.0),
    ("ZeroOne(variance_steps=100, variance_doubling=100, local_doubling=4, most_local=4)", 1.0),
    ("SketchedSGD(0.5, momentum=0.5, masking=False, dense_below=0)", 2.0),
    ("SketchedSGD(0.25, momentum=0.5, masking=False, dense_below=0, recovery='gather', lr_in_residual=False)", 2.0),
    ("SketchedSGD(0.5, momentum=0.0, dense_below=0)", 1.0),
    ("FetchSGD(0.25, columns=2, momentum=0.5, conserving=True)", 2.0),
    ("Local()", 1.0),
    ("LocalSGD(period=4)", 1.0),
    ("MinibatchLocalSGD(period=4, inner=0.3)", 1.0),
    ("CoCoD(period=4)", 1.0),
    ("EASGD(period=4, pull=0.3)", 0.9 / 1.2),
    ("EASGD(period=4, centre_pull=0.5, pull=0.3, momentum=0.6)", 0.5 / 0.8 / 0.4),
    ("EASGD(period=4, centre_pull=0.5, pull=0.2, codec=ErrorFeedback(Fp32()))", 0.5 / 0.7),
    ("SlowMo(period=4, momentum=0.0)", 1.0),
    ("SlowMo(period=4, momentum=0.5)", 2.0),
    ("SlowMo(period=4, momentum=0.8, lr=0.7)", 3.5),
    ("SlowMo(base=LocalSGD(period=2), period=4, momentum=0.5)", 2.0),
    ("SlowMo(DecentLaM(momentum=0.5), period=4, momentum=0.5)", 4.0),
    ("SlowMo(Probe(LocalSGD(period=2)), period=4, momentum=0.5)", 2.0),
    ("Offloaded(SlowMo(period=4, momentum=0.5))", 2.0),
    ("Sharded(SlowMo(period=4, momentum=0.5))", 2.0),
    ("NodeAverage(LocalSGD(period=4), period=2, node_size=1)", 1.0),
    ("Budget(LocalSGD(period=4), '10B/step')", 1.0),
    ("Budget(SlowMo(period=4, momentum=0.5), '10B/step')", 2.0),
    ("Paced(LocalSGD(period=4), steps=(4,))", 1.0),
    ("Probe()", 1.0),
    ("DiLoCo(period=4, outer=OuterOptimizer('SGD', lr=0.7, momentum=0.5))", 1.4),
    ("DiLoCo(period=4, outer=OuterOptimizer('SGD', lr=0.7, momentum=0.5, nesterov=True))", 1.4),
    ("DiLoCo(period=4, outer=OuterOptimizer('SGD', lr=0.7, momentum=0.5), delay=2)", 0.7),
    ("DiLoCo(period=4, outer=OuterOptimizer('SGD', lr=0.7, momentum=0.5), fragments=2, mixing=0.5)", 1.4 / 1.2),
    ("DiLoCo(period=4, outer=OuterOptimizer('SGD', lr=1.0), fragments=2, delay=1, mixing=0.5)", 0.875),
    ("OverlapLocalSGD(period=4)", 0.4 / 0.58),
    ("OverlapLocalSGD(period=4, pull=0.2)", 0.8 / 0.86),
    ("OverlapLocalSGD(period=4, momentum=0.9)", 0.4 / 0.46),
    ("OverlapLocalSGD(period=4, compensate=True)", 1.0),
    ("Streaming(OverlapLocalSGD(period=4), fragments=2)", 0.4 / 0.58),
    ("Gossip()", 1.0),
    ("Gossip(order='after')", 1.0),
    ("DecentLaM(momentum=0.5)", 2.0),
    ("DecentLaM(momentum=0.5, nesterov=True)", 2.0),
    ("QuasiGlobal(momentum=0.5)", 2.0),
    ("QuasiGlobal(momentum=0.5, nesterov=True, memory=0.2)", 2.0),
    ("DoubleAveraging(momentum=0.5)", 2.0),
    ("ExactDiffusion(momentum=0.5)", 1.0),
    ("NoLoCo(period=4)", 1.4),
    ("NoLoCo(period=4, lr=0.6, momentum=0.4, pull=0.9)", 1.0),
    ("Choco(codec=OneBit(8))", 1.0),
    ("PushSum()", 1.0),
    ("PushSum(staleness=1)", 1.0),
    ("EagerPushSum()", 1.0),
    ("ADPSGD()", 1.0),
    ("LeaderSGD(period=4)", 1.0),
    ("MultiLeaderSGD(period=4, node_size=1, global_period=8)", 1.0),
    ("LeaderGradientDescent()", 1.0),
    ("BackupWorkers()", 1.0),
    ("BackupWorkers(backups=0)", 1.0),
]
"""With what training was measured to have."""

UNKNOWN: list[str] = [
    "EASGD()",  # its pull is that of the number of workers
    "ParameterServer()",  # adds up the updates of all workers
    "ParameterServer('staleness')",
    # What is lost depends on the gradients.
    "SketchedSGD()",
    "SketchedSGD(masking=False, second_round=0)",
    "FetchSGD()",
    "CompressedMomentum(feedback=False)",
    "AllReduce(MajorityVote())",
    "AllReduce(ErrorFeedback(TopK(0.25), decay=0.5))",
    "LocalSGD(codec=ErrorFeedback(TopK(0.25), decay=0.5))",
    "MinibatchLocalSGD(codec=ErrorFeedback(TopK(0.25), decay=0.5))",
    "CoCoD(codec=ErrorFeedback(TopK(0.25), decay=0.5))",
    "SlowMo(codec=ErrorFeedback(TopK(0.25), decay=0.5))",
    "DiLoCo(codec=ErrorFeedback(TopK(0.25), decay=0.5))",
    # Who leads may be ahead of the others or behind. Who leaves out steps, and how long rounds are, is as open.
    "AsyncLeaderSGD()",
    "Paced()",
    "Paced(LocalSGD(4), steps=(4, 1))",
    "Budget(OverlapLocalSGD())",
    "Budget(CoCoD())",
    "Budget(DiLoCo(delay=4, mixing=0.5))",
    # Their rounds begin anew after each slow step.
    "SlowMo(OverlapLocalSGD())",
    "SlowMo(EASGD(pull=0.3))",
    "DiLoCo(OverlapLocalSGD())",
    "DiLoCo(outer=OuterOptimizer('Adam', lr=0.01))",
    "DiLoCo(outer=OuterOptimizer('SGD', lr=1.0, momentum=1.5))",
]

OPTIMIZERS: dict[type, Callable[[Any], torch.optim.Optimizer]] = {
    # Their variance has settled when it is frozen.
    CompressedMomentum: partial(OneBitAdam, lr=0.5, betas=(0.9, 0.9)),
    ZeroOne: partial(ZeroOneAdam, lr=0.5, betas=(0.9, 0.9)),
}


def test_the_factor_of_every_recipe_is_the_measured_one_or_unknown() -> None:
    for recipe, factor in RECIPES:
        assert parse(recipe).traits.lr_factor == pytest.approx(factor), recipe
    assert [recipe for recipe in UNKNOWN if parse(recipe).traits.lr_factor is not None] == []


def test_every_registered_strategy_is_measured_unless_its_factor_is_not_known() -> None:
    measured = {type(parse(recipe)) for recipe, _ in RECIPES}
    unknown = {type(parse(recipe)) for recipe in UNKNOWN}
    kinds = {kind for kind in recipe_classes().values() if issubclass(kind, Strategy)}
    assert not kinds - measured - unknown, "add them to RECIPES, or to UNKNOWN with None"
    assert all(kind().traits.lr_factor is None for kind in kinds - measured)


def moved(comm: Comm, strategy: Strategy) -> torch.Tensor:
    """How far a worker has come in the last rounds; all of them at all steps, where workers have no steps in common."""
    model = nn.ParameterList([torch.zeros(4, dtype=torch.float64)])
    make = OPTIMIZERS.get(type(strategy), partial(torch.optim.SGD, lr=0.5))
    worker = thinwire.attach(model, make(model.parameters()), strategy, comm=comm)
    before = torch.zeros(4, dtype=torch.float64)
    while worker.step < ROUNDS * PERIOD:
        if worker.step == (ROUNDS - LAST) * PERIOD and not strategy.traits.timing_dependent:
            before = model[0].detach().clone()
        worker.optimizer.zero_grad()
        model[0].sum().backward()
        worker.record_batch(loss=1.0)
        worker.optimizer.step()
    if not strategy.traits.timing_dependent:
        return (before - model[0].detach()) / (LAST * PERIOD)
    with worker.consensus():
        found = -model[0].detach().clone() / (ROUNDS * PERIOD)
    worker.detach()
    return found


@pytest.mark.parametrize(("recipe", "factor"), one_of_each(RECIPES, lambda each: type(parse(each[0]))), ids=str)
def test_where_gradients_stay_alike_parameters_move_by_the_effective_rate(recipe: str, factor: float) -> None:
    strategy = parse(recipe)
    for x in thinwire.run_threads(2, lambda comm: moved(comm, strategy)):
        assert (x / 0.5).tolist() == pytest.approx([factor] * 4, rel=5e-3)


def test_the_pull_of_easgd_by_default_and_a_server_s_updates_depend_on_the_number_of_workers() -> None:
    """So no number would be right for `EASGD()` and `ParameterServer()`."""
    elastic = thinwire.run_threads(3, lambda comm: moved(comm, EASGD(period=4)))[0]
    assert (elastic / 0.5).tolist() == pytest.approx([3 / 4] * 4, rel=1e-3)
    served = thinwire.run_threads(3, lambda comm: moved(comm, ParameterServer()))[0]
    assert (served / 0.5).tolist() == pytest.approx([3] * 4, rel=1e-3)


def test_the_command_prints_it_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    cli = pytest.importorskip("thinwire.cli")
    assert cli.main(["explain", "SlowMo(period=4)", "--parameters", "1000", "--workers", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Learning rate effective 2 times the optimizer's in the long run" in said
    assert "give the optimizer 0.5 times what AllReduce() has" in said
    assert cli.main(["explain", "LocalSGD(period=4)", "--parameters", "1000", "--workers", "2"]) == 0
    assert "Learning rate" not in capsys.readouterr().out
