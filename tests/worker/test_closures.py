# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose step evaluates a closure, once or several times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn

import thinwire
from tests.problems import Quadratic, flat, quadratic
from tests.rules import for_each
from thinwire import (
    EASGD,
    AllReduce,
    BackupWorkers,
    Comm,
    ConfigError,
    Gossip,
    LeaderGradientDescent,
    Local,
    LocalSGD,
    MinibatchLocalSGD,
    Probe,
    PushSum,
    Replica,
    SlowMo,
    Strategy,
)
from thinwire.methods.optimizers.svrg import Svrg
from thinwire.methods.strategies.base import Traits

DOUBLE = torch.float64
Make = Callable[[nn.Module], torch.optim.Optimizer]


def lbfgs(model: nn.Module, **settings: object) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), **{"lr": 0.5, "max_iter": 4, **settings})


def searching(model: nn.Module) -> torch.optim.Optimizer:
    return lbfgs(model, line_search_fn="strong_wolfe", lr=1.0)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def run(
    comm: Comm | None, strategy: Strategy, make: Make, steps: int = 4, n: int = 3, *, closed: bool = True
) -> tuple[Tensor, list[int]]:
    """One rank's parameters after every step, and how many gradients each step evaluated."""
    problem = quadratic(n, DOUBLE)
    model = problem.model()
    optimizer = make(model)
    worker = thinwire.attach(model, optimizer, strategy, comm=comm)
    seen, evaluations = list[Tensor](), list[int]()
    for k in range(steps):
        evaluations.append(0)

        def closure(k: int = k) -> Tensor:
            evaluations[-1] += 1
            optimizer.zero_grad()
            loss = problem.loss(model, worker.comm.rank, k)
            loss.backward()
            worker.record_batch(loss=loss)
            return loss

        if closed:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        seen.append(flat(model))
    worker.detach()
    return torch.stack(seen), evaluations


def alone(problem: Quadratic, loss_of: Callable[[nn.Module], Tensor], make: Make, steps: int) -> Tensor:
    """The bare optimizer on a loss."""
    model = problem.model()
    optimizer = make(model)
    seen = list[Tensor]()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        seen.append(flat(model))
    return torch.stack(seen)


@pytest.mark.parametrize("make", [lbfgs, searching])
@pytest.mark.parametrize("strategy", [AllReduce(), Probe(AllReduce(), every=2)], ids=str)
def test_under_all_reduce_lbfgs_minimises_the_mean_loss_as_one_process_would(strategy: Strategy, make: Make) -> None:
    problem = quadratic(3, DOUBLE)

    def mean_loss(model: nn.Module) -> Tensor:
        return torch.stack([problem.loss(model, rank, 0) for rank in range(3)]).mean()

    expected = alone(problem, mean_loss, make, 4)
    results = thinwire.run_threads(3, lambda comm: run(comm, strategy, make), timeout=20)
    for seen, evaluations in results:
        assert torch.allclose(seen, expected, rtol=1e-9, atol=1e-12)
        assert evaluations == results[0][1]
        assert evaluations[0] > 1


def test_between_averages_each_worker_runs_its_own_lbfgs_which_a_slow_step_follows() -> None:
    problem = quadratic(3, DOUBLE)
    expected = torch.stack(
        [alone(problem, lambda model, rank=rank: problem.loss(model, rank, 0), lbfgs, 2) for rank in range(3)]
    )
    mean = expected[:, 1].mean(0)
    slow = problem.start + 0.5 * (mean - problem.start)
    for strategy, end in ((LocalSGD(2), mean), (SlowMo(period=2, momentum=0.5, lr=0.5), slow)):
        results = thinwire.run_threads(3, lambda comm, s=strategy: run(comm, s, lbfgs, 2))
        found = torch.stack([x for x, _ in results])
        assert torch.allclose(found[:, 0], expected[:, 0], rtol=0, atol=1e-12)
        assert torch.allclose(found[:, 1], end.expand(3, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "make", "optimizer"),
    [
        (BackupWorkers(), lbfgs, "LBFGS"),
        (BackupWorkers(), lambda model: Svrg(model.parameters(), lr=0.1), "Svrg"),
        (SlowMo(BackupWorkers(backups=0)), None, ""),
    ],
)
def test_strategies_that_know_of_one_gradient_a_step_refuse_several_before_the_first_step(
    strategy: Strategy, make: Make | None, optimizer: str
) -> None:
    def body(comm: Comm) -> None:
        model = quadratic(2, DOUBLE).model()
        thinwire.attach(model, (make or lbfgs)(model), strategy, comm=comm).detach()

    if make is None:
        thinwire.run_threads(2, body)
        return
    with pytest.raises(ConfigError, match=f"{optimizer} under .* calls its closure several times"):
        thinwire.run_threads(2, body)


@dataclass(frozen=True)
class Doubled(Strategy):
    """Doubles the gradient."""

    @cached_property
    def traits(self) -> Traits:
        return Traits(reads_gradient=True)

    def before_step(self, r: Replica) -> None:
        r.g.mul_(2)


class Twice(torch.optim.SGD):
    """Evaluates the gradient twice, and nobody knows it beforehand."""

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            closure()
        return super().step(closure)  # pyright: ignore[reportReturnType]


def test_an_unknown_optimizer_that_evaluates_several_gradients_is_refused_at_its_first_step() -> None:
    with pytest.raises(ConfigError, match=r"Twice under Doubled\(\): .* calls its closure several times"):
        run(None, Doubled(), lambda model: Twice(model.parameters(), lr=0.1), n=1)
    with pytest.raises(ConfigError, match=r"LBFGS under Doubled\(\)"):
        run(None, Doubled(), lbfgs, n=1)


@pytest.mark.parametrize("closed", [True, False])
def test_a_gradient_that_the_strategy_rewrites_is_rewritten_within_the_closure_too(closed: bool) -> None:
    found, _ = run(None, Doubled(), sgd, n=1, closed=closed)
    expected, _ = run(None, LocalSGD(), lambda model: sgd(model, 0.2), n=1)
    assert torch.equal(found, expected)


@for_each(
    [
        *(AllReduce(), LocalSGD(2), Gossip(), Gossip(order="after"), PushSum(), Local(), SlowMo(Gossip(), period=2)),
        *(EASGD(2), LeaderGradientDescent(0.3), MinibatchLocalSGD(2)),
    ]
)
def test_a_closure_that_is_evaluated_once_trains_as_without_it(strategy: Strategy) -> None:
    within, without = (
        thinwire.run_threads(3, lambda comm, c=closed: run(comm, strategy, sgd, closed=c)[0])
        for closed in (True, False)
    )
    assert all(map(torch.equal, within, without))


@pytest.mark.parametrize("strategy", [Gossip(), EASGD(1), LeaderGradientDescent(0.3)], ids=str)
def test_hooks_run_once_a_step_however_often_the_gradient_is_evaluated(strategy: Strategy) -> None:
    def body(comm: Comm) -> tuple[int, int]:
        before = comm.meter.messages
        _, evaluations = run(comm, strategy, lbfgs)
        several = comm.meter.messages - before
        before = comm.meter.messages
        run(comm, strategy, sgd)
        assert sum(evaluations) > 4
        return several, comm.meter.messages - before

    assert all(several == once for several, once in thinwire.run_threads(3, body))


def test_a_rank_without_a_batch_cannot_join_an_optimizer_that_needs_a_closure() -> None:
    model = quadratic(1, DOUBLE).model()
    worker = thinwire.attach(model, lbfgs(model), AllReduce())
    with pytest.raises(ConfigError, match=r"join\(\) with LBFGS: its step calls a closure"):
        next(worker.join([1, 2]))


@pytest.mark.parametrize("strategy", [EASGD(period=2), Gossip(), LocalSGD(2)], ids=str)
def test_a_step_whose_closure_failed_is_taken_again_as_if_it_had_not(strategy: Strategy) -> None:
    def body(comm: Comm, failing: bool) -> Tensor:
        problem = quadratic(2, DOUBLE)
        model = problem.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        worker = thinwire.attach(model, optimizer, strategy, comm=comm)
        for k in range(6):

            def closure(k: int = k, fails: bool = False) -> Tensor:
                optimizer.zero_grad()
                if fails:
                    raise MemoryError("the batch is too large")
                loss = problem.loss(model, comm.rank, k)
                loss.backward()
                return loss

            if failing and comm.rank == 1 and k in (2, 3, 4):
                with pytest.raises(MemoryError):
                    optimizer.step(lambda closure=closure: closure(fails=True))
            optimizer.step(closure)
        worker.detach()
        return flat(model)

    failed, whole = (thinwire.run_threads(2, lambda comm, f=f: body(comm, f), timeout=5) for f in (True, False))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(failed, whole, strict=True))
