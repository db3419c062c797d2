# SPDX-License-Identifier: Apache-2.0
"""DiLoCo with any outer optimizer: the methods that it is, and what is refused."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import thinwire
from tests.methods.strategies.local_runs import ended, run, sgd
from tests.oracles.common import Descent
from tests.oracles.diloco import Rule, streaming_diloco
from tests.oracles.updates import AdamW
from tests.problems import Regression, distance
from tests.rules import for_each, refusals
from thinwire import Comm, ConfigError, DiLoCo, Local, LocalSGD, Offloaded, Sharded, SlowMo, Strategy, Streaming
from thinwire.core.comm.threads import single_worker
from thinwire.core.replica.replica import Replica
from thinwire.lab.runs.recipes import modules_of
from thinwire.methods.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.methods.strategies.local.outer_step import OuterStep

DOUBLE = torch.float64
STEPS = 20
DILOCO = DiLoCo(period=5)
SERVER = DiLoCo(period=5, outer=OuterOptimizer("AdamW", lr=0.05, betas=(0.9, 0.999), weight_decay=0.01))

LAMB = OuterOptimizer("thinwire.methods.optimizers:Lamb", lr=0.1)


def halved(parameters: list[torch.nn.Parameter], lr: float) -> Optimizer:
    return torch.optim.SGD(parameters, lr=lr / 2)


def unannotated(parameters, lr):  # type: ignore[no-untyped-def]
    return torch.optim.SGD(parameters, lr=lr)


def untrue(parameters: list[torch.nn.Parameter], lr: float) -> Optimizer:
    return parameters  # type: ignore[return-value]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_rounds_whose_mean_change_is_the_gradient_of_adam_are_federated_adam(n: int) -> None:
    def outer() -> Rule:
        adam, counts = AdamW([0.05] * STEPS), count()
        return lambda point, gradient: point + adam(point, gradient, next(counts))

    problem = Regression(n, STEPS, DOUBLE)
    start, update = problem.start.expand(n, -1), Descent([0.05] * STEPS)
    expected = streaming_diloco(problem.gradient, start, update, STEPS, period=5, outer=outer)
    assert distance(ended(n, SERVER, problem, STEPS, sgd(0.05, 0.0)), expected) < 1e-12


def test_the_outer_optimizer_s_state_is_part_of_the_strategy_s() -> None:
    (r,) = run(None, SERVER, Regression(1, 10, DOUBLE), 10, sgd()).replicas
    assert set(r.state) == {"anchor", "outer.step", "outer.exp_avg", "outer.exp_avg_sq"}
    assert r.state["outer.step"] == 2


@for_each(["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor"])
def test_every_dense_optimizer_of_torch_continues_where_it_stopped(name: str) -> None:
    outer, x, y = OuterOptimizer(name, lr=0.1), torch.ones(3), torch.ones(3)
    state: dict[str, Tensor] = {}
    parameter = torch.nn.Parameter(y)
    kept = getattr(torch.optim, name)([parameter], lr=0.1)
    for step in range(4):
        gradient = torch.tensor([1.0, -2.0, 0.5]) * (step + 1)
        outer.step_(x, gradient.clone(), state)
        parameter.grad = gradient.clone()
        kept.step()
    assert torch.equal(x, y)


test_outer_optimizers_that_cannot_work_are_refused_with_the_reason = refusals(
    [
        (lambda: OuterOptimizer("SDG"), "torch.optim has no such optimizer; did you mean SGD"),
        (lambda: OuterOptimizer("Optimizer"), "must be a subclass of Optimizer"),
        (lambda: OuterOptimizer("SGD", lr=0.0), "outer lr=0.0: must be positive"),
        (lambda: OuterOptimizer("SGD", momentum=-1.0), "Invalid momentum value"),
        (lambda: OuterOptimizer("SGD", nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda: OuterOptimizer("AdamW", momentum=0.9), "unexpected keyword argument 'momentum'"),
        (lambda: OuterOptimizer("LBFGS"), "its step needs more than a gradient"),
        (lambda: OuterOptimizer("SparseAdam"), "its step needs more than a gradient"),
        (lambda: OuterOptimizer("Adam", betas=[0.9, 0.95]), r"betas=\[0.9, 0.95\]: must be a number, a string"),
        (lambda: OuterOptimizer("Adam", betas=open), "so that a recipe can hold it"),
        (lambda: OuterOptimizer("Adam", eps=float("nan")), "so that a recipe can hold it"),
        (lambda: OuterOptimizer("torch.optim:"), "must be a name in torch.optim, or 'module:Name'"),
        (lambda: OuterOptimizer("thinwire/optimizers:Lamb"), "or 'module:Name'"),
        (lambda: OuterOptimizer("no_such_module:Lamb"), "No module named 'no_such_module'"),
        (lambda: OuterOptimizer("thinwire.methods.optimizers:Lam"), "no such optimizer; did you mean Lamb"),
        (
            lambda: OuterOptimizer("os:system").check(),
            "must be a subclass of Optimizer, or a function annotated",
        ),
        (lambda: OuterOptimizer(f"{__name__}:unannotated"), "must be a subclass of Optimizer, or a function"),
        (lambda: OuterOptimizer(f"{__name__}:untrue"), "returned a list, not an Optimizer"),
        (lambda: OuterOptimizer(lr="1"), "lr must be a number"),  # type: ignore[arg-type]
        (lambda: OuterOptimizer(3), "optimizer must be a str"),  # type: ignore[arg-type]
        (lambda: DiLoCo(outer="SGD"), "outer must be a OuterOptimizer"),  # type: ignore[arg-type]
        (lambda: DiLoCo(period=0), "period=0: must be at least 1"),
        (lambda: DiLoCo(SlowMo()), r"outer steps cannot be nested. Use its base, Local\(\)"),
        (lambda: SlowMo(Sharded(DiLoCo())), "outer steps cannot be nested. Use its base, DiLoCo"),
        (lambda: SlowMo(buffers="drop"), "'maintain' or 'reset' or 'average'"),  # type: ignore[arg-type]
        (lambda: Sharded(SlowMo(exact=False)).check(2), "all workers need their own state"),
        (lambda: Sharded(Offloaded(SlowMo(exact=False))).check(2), "all workers need their own state"),
        (lambda: Sharded(DiLoCo(outer=LAMB)).check(2), "needs the whole vector"),
        (lambda: Streaming(Sharded(SlowMo(buffers="average"))), "Use buffers='maintain'"),
        (lambda: Sharded(LocalSGD()), r"has no outer steps. Use SlowMo\(\) or DiLoCo\(\)"),
        (lambda: Offloaded(Local()), "has no outer steps"),
    ]
)


@for_each([SERVER, DILOCO, DiLoCo(outer=LAMB), SlowMo(Local(), buffers="reset", exact=False)])
def test_recipes_with_outer_optimizers_are_made_again_from_their_text(strategy: Strategy) -> None:
    assert thinwire.parse(repr(strategy)) == strategy
    assert hash(thinwire.parse(str(strategy))) == hash(strategy)


def test_an_optimizer_of_another_module_is_a_class_or_a_function_that_makes_one() -> None:
    problem = Regression(2, STEPS, DOUBLE)
    outer = OuterOptimizer(f"{__name__}:halved", lr=1.0)
    made, plain = (
        ended(2, DiLoCo(period=5, outer=each), problem, STEPS, sgd()) for each in (outer, OuterOptimizer("SGD", lr=0.5))
    )
    assert torch.equal(made, plain)
    assert OuterOptimizer("torch.optim:SGD", lr=0.5) == OuterOptimizer("SGD", lr=0.5)
    x, y = torch.ones(4), torch.nn.Parameter(torch.ones(4))
    LAMB.step_(x, torch.arange(4.0), {})
    y.grad = torch.arange(4.0)
    thinwire.Lamb([y], lr=0.1).step()
    assert torch.equal(x, y)


def test_a_recipe_from_a_file_does_not_import_an_outer_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer_of_mine.py").write_text("from torch.optim import SGD as Mine", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    text = "Sharded(DiLoCo(outer=OuterOptimizer('outer_of_mine:Mine', lr=0.1, momentum=0.5)))"
    with pytest.raises(ConfigError, match="outer_of_mine:Mine is not imported, and a recipe that is read from a file"):
        thinwire.parse(text, imports=False)
    assert "outer_of_mine" not in sys.modules
    try:
        strategy = thinwire.parse(text)
        assert modules_of(strategy) == ["outer_of_mine"]
        assert thinwire.parse(repr(strategy), imports=False) == strategy
    finally:
        sys.modules.pop("outer_of_mine", None)
    with pytest.raises(ConfigError, match="no module no_such_module is installed"):
        thinwire.parse("DiLoCo(outer=OuterOptimizer('no_such_module:Lamb'))")


def test_the_order_of_arguments_makes_no_other_recipe() -> None:
    one, two = OuterOptimizer(momentum=0.9, nesterov=True), OuterOptimizer(nesterov=True, momentum=0.9)
    assert one == two
    assert hash(one) == hash(two)
    assert repr(one) == "OuterOptimizer(optimizer='SGD', lr=0.7, momentum=0.9, nesterov=True)"


@pytest.mark.parametrize(
    ("outer", "elementwise"),
    [
        (OuterOptimizer(), True),
        (OuterOptimizer("AdamW", lr=0.1), True),
        (LAMB, False),
        (OuterOptimizer("Adafactor", lr=0.1), False),
    ],
    ids=repr,
)
def test_optimizers_with_norms_are_told_from_elementwise_ones(outer: OuterOptimizer, elementwise: bool) -> None:
    assert outer.is_elementwise() == elementwise


@for_each(
    [
        SlowMo(LocalSGD(2), period=4, momentum=0.0, lr=0.5),
        Sharded(SlowMo(LocalSGD(2), period=4, momentum=0.0, lr=0.5)),
        SlowMo(Local(), period=4, momentum=0.0, lr=0.5, codec=thinwire.ErrorFeedback(thinwire.TopK(1.0))),
        DiLoCo(period=4, outer=OuterOptimizer("SGD", lr=0.5)),
        LocalSGD(4, codec=thinwire.Quantize(4, 8)),
    ]
)
def test_a_round_that_is_begun_anew_starts_at_the_parameters(strategy: Strategy) -> None:
    def work(comm: Comm) -> Tensor:
        model = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (r,) = thinwire.attach(model, optimizer, strategy, comm=comm).replicas
        for step in range(8):
            if step == 5:
                r.x.fill_(5.0)
                strategy.restart(r)
            model.weight.grad = torch.full_like(model.weight, (comm.rank + 1.0) * (step < 5))
            optimizer.step()
        return r.x.clone()

    for x in thinwire.run_threads(2, work):
        assert torch.equal(x, torch.full_like(x, 5.0))


@for_each([DiLoCo(period=2), SlowMo(period=2)])
def test_an_outer_step_does_not_change_the_average_which_may_be_the_parameters(strategy: OuterStep) -> None:
    r = Replica(torch.ones(3), torch.empty(0), single_worker(), lr=lambda: 0.1)
    strategy.start(r)
    average = torch.tensor([1.0, 2.0, 3.0])
    if isinstance(strategy, SlowMo):
        r.state["num_steps"] += 1
        r.state["lr_sum"] += 0.1
    strategy.step_(r.state, r.state["anchor"].clone(), average)
    assert average.tolist() == [1.0, 2.0, 3.0]
    assert not torch.equal(r.state["anchor"], torch.ones(3))
