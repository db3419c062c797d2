"""Any optimizer for the slow step: what it makes of SlowMo, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire
from tests.oracles import common as oracles
from tests.oracles import local as oracles_local
from tests.oracles.local import Adam, Momentum
from tests.pool import run_processes
from tests.problems import Regression, distance, flat
from tests.strategies.local_runs import Make, adamw, begin, ended, go_on, run, sgd
from thinwire import Comm, ConfigError, Local, PushSum, SlowMo
from thinwire.strategies.local.outer_optimizer import OuterOptimizer
from thinwire.strategies.recipe import brief

DOUBLE = torch.float64
STEPS = 20
DILOCO = SlowMo(period=5, outer=OuterOptimizer("SGD", lr=0.7, momentum=0.9, nesterov=True))
BLOCK = SlowMo(period=5, outer=OuterOptimizer("SGD", lr=0.9, momentum=0.6, nesterov=True))
SERVER = SlowMo(period=5, outer=OuterOptimizer("AdamW", lr=0.05, options="betas=(0.9, 0.999), weight_decay=0.01"))


def case(strategy: SlowMo) -> tuple[Make, Any]:
    """The workers' optimizer, and the oracle."""
    return {
        DILOCO: (adamw(0.01), lambda *a: oracles_local.diloco(*a, Adam(0.01), STEPS, period=5, lr=0.7, momentum=0.9)),
        BLOCK: (
            sgd(0.05),
            lambda *a: oracles_local.block_momentum(*a, Momentum(0.05), STEPS, period=5, momentum=0.6, rate=0.9)[0],
        ),
        SERVER: (
            sgd(0.05, 0.0),
            lambda *a: oracles_local.federated_adam(*a, Momentum(0.05, 0.0), STEPS, period=5, outer=Adam(0.05)),
        ),
    }[strategy]


@pytest.mark.parametrize("strategy", [DILOCO, BLOCK, SERVER], ids=["diloco", "bmuf", "federated adam"])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_known_methods_are_outer_optimizers(strategy: SlowMo, n: int) -> None:
    make, oracle = case(strategy)
    problem = Regression(n, STEPS, DOUBLE)
    real = ended(n, strategy, problem, STEPS, make)
    assert distance(real, oracle(problem.gradient, problem.start.expand(n, -1))) < 1e-12


def outer_runs() -> list[list[float]]:
    comm = thinwire.GroupComm()
    problem = Regression(comm.size, STEPS, DOUBLE)
    return [flat(run(comm, s, problem, STEPS, case(s)[0]).model).tolist() for s in (DILOCO, BLOCK, SERVER)]


def test_known_methods_are_outer_optimizers_on_processes() -> None:
    rows = torch.tensor(run_processes(3, outer_runs), dtype=DOUBLE)
    problem = Regression(3, STEPS, DOUBLE)
    for i, strategy in enumerate((DILOCO, BLOCK, SERVER)):
        assert distance(rows[:, i], case(strategy)[1](problem.gradient, problem.start.expand(3, -1))) < 1e-12


def test_heavy_ball_outside_is_classical_block_momentum_at_any_learning_rate() -> None:
    problem = Regression(4, STEPS, DOUBLE)
    strategy = SlowMo(period=5, outer=OuterOptimizer("SGD", lr=1.0, momentum=0.75))
    rates = [0.02 * (k + 1) for k in range(STEPS)]

    def warm(worker: Any, step: int) -> None:
        worker.optimizer.param_groups[0]["lr"] = rates[step]

    real = ended(4, strategy, problem, STEPS, sgd(0.1, 0.0), before_step=warm)
    start = problem.start.expand(4, -1)
    block = oracles.block_momentum(problem.gradient, start, oracles.Descent(rates), STEPS, period=5, momentum=0.75)
    assert distance(real, block) < 1e-12


def test_one_worker_under_plain_outer_descent_is_lookahead() -> None:
    problem = Regression(1, STEPS, DOUBLE)
    real = ended(1, SlowMo(period=5, outer=OuterOptimizer("SGD", lr=0.5)), problem, STEPS, adamw(0.01))
    start, worker = problem.start.expand(1, -1), Adam(0.01)
    ahead = oracles.lookahead(problem.gradient, start, lambda x, g, k: worker(x, g), STEPS, period=5, pull=0.5)  # type: ignore[arg-type]
    assert distance(real, ahead) < 1e-12


def test_slow_momentum_is_outer_sgd_with_momentum_at_a_constant_learning_rate() -> None:
    problem = Regression(3, STEPS, DOUBLE)
    real, outer = (
        ended(3, strategy, problem, STEPS, sgd(0.05))
        for strategy in (
            SlowMo(period=5, momentum=0.5),
            SlowMo(period=5, outer=OuterOptimizer("SGD", lr=1.0, momentum=0.5)),
        )
    )
    assert distance(real, outer) < 1e-12


@pytest.mark.parametrize(
    "strategy",
    [
        SERVER,
        DILOCO,
        SlowMo(PushSum(), period=5, momentum=0.5, buffers="reset"),
        SlowMo(period=5, buffers="average", shard=True),
        SlowMo(period=5, outer=OuterOptimizer("Adam", lr=0.05), shard=True, device="cpu"),
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [7, 10])
def test_a_run_resumed_from_its_checkpoint_is_the_uninterrupted_one(
    strategy: SlowMo, saved: int, tmp_path: Path
) -> None:
    problem = Regression(3, STEPS, torch.float32)

    def body(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = go_on(begin(comm, strategy, problem, adamw()), problem, range(saved))
        whole.save(tmp_path)
        go_on(whole, problem, range(saved, STEPS))
        again = begin(comm, strategy, problem, adamw())
        again.load(tmp_path)
        go_on(again, problem, range(saved, STEPS))
        return tuple({"x": r.x, **r.state} for worker in (whole, again) for r in worker.replicas)  # type: ignore[return-value]

    for whole, again in thinwire.run_threads(3, body):
        assert whole.keys() == again.keys()
        assert all(torch.equal(x, again[name]) for name, x in whole.items())


def test_the_outer_optimizer_s_state_is_part_of_the_strategy_s() -> None:
    (r,) = run(None, SERVER, Regression(1, 10, DOUBLE), 10, sgd()).replicas
    assert set(r.state) == {"anchor", "outer.step", "outer.exp_avg", "outer.exp_avg_sq"}
    assert r.state["outer.step"] == 2


@pytest.mark.parametrize(
    "name", ["ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor"]
)
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


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OuterOptimizer("SDG"), "torch.optim has no such optimizer; did you mean SGD"),
        (lambda: OuterOptimizer("Optimizer"), "no such optimizer"),
        (lambda: OuterOptimizer("SGD", lr=0.0), "outer lr=0.0: must be positive"),
        (lambda: OuterOptimizer("SGD", momentum=-1.0), "Invalid momentum value"),
        (lambda: OuterOptimizer("SGD", nesterov=True), "Nesterov momentum requires a momentum"),
        (lambda: OuterOptimizer("AdamW", momentum=0.9), "unexpected keyword argument 'momentum'"),
        (lambda: OuterOptimizer("LBFGS"), "its step needs more than a gradient"),
        (lambda: OuterOptimizer("SparseAdam"), "its step needs more than a gradient"),
        (lambda: OuterOptimizer("Adam", options="betas=open('x')"), "cannot be read"),
        (lambda: OuterOptimizer("Adam", options="0.9"), "they have no names"),
        (lambda: OuterOptimizer("Adam", options="betas=(0.9"), "cannot be read"),
        (lambda: OuterOptimizer(lr="1"), "lr must be a number"),  # type: ignore[arg-type]
        (lambda: SlowMo(outer=OuterOptimizer(), momentum=0.4), "the outer optimizer takes the slow step"),
        (lambda: SlowMo(outer="SGD"), "outer must be a OuterOptimizer or None"),  # type: ignore[arg-type]
        (lambda: SlowMo(buffers="drop"), "'maintain' or 'reset' or 'average'"),  # type: ignore[arg-type]
        (lambda: SlowMo(shard=True, exact=False), "nothing to shard"),
        (lambda: SlowMo(device="cuda"), "device must be 'cpu' or None"),  # type: ignore[arg-type]
    ],
)
def test_outer_optimizers_that_cannot_work_are_refused_with_the_reason(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("strategy", [SERVER, DILOCO, SlowMo(Local(), buffers="reset", exact=False)], ids=str)
def test_recipes_with_outer_optimizers_are_made_again_from_their_text(strategy: SlowMo) -> None:
    assert thinwire.parse(repr(strategy)) == strategy
    assert hash(thinwire.parse(brief(strategy))) == hash(strategy)
